// Products by NVIDIA's cuBLASLt, where the chip's tensor cores multiply codes as they are.
#pragma once

#include "quire/base/kernel_table.h"
#include "quire/spec/problem.h"

namespace quire::cuda {

bool refuses_cublaslt(const GemmProblem& p, const Context& context, Refusal* refusal);
void gemm_cublaslt(const GemmProblem& p, const Context& context);

}  // namespace quire::cuda
