// Products by NVIDIA's cuBLASLt: of codes, where the chip's tensor cores multiply them as they are, or of what codes
// are in bfloat16.
#pragma once

#include "quire/base/kernel_table.h"
#include "quire/spec/problem.h"

namespace quire::cuda {

bool refuses_cublaslt(const GemmProblem& p, const Context& context, Refusal* refusal);
void gemm_cublaslt(const GemmProblem& p, const Context& context);

/// Decodes both operands into memory of the workspace first, where that is exact.
bool refuses_cublaslt_bf16(const GemmProblem& p, const Context& context, Refusal* refusal);
void gemm_cublaslt_bf16(const GemmProblem& p, const Context& context);

}  // namespace quire::cuda
