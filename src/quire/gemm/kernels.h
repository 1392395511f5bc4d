// The kernels of gemm and column_sum, in order of preference.
#pragma once

#include <span>
#include <string>

#include "quire/base/kernel_table.h"
#include "quire/spec/problem.h"

namespace quire {

std::string to_string(const ColumnSumProblem& p);

std::span<const KernelRow<GemmProblem>> gemm_kernels();
std::span<const KernelRow<ColumnSumProblem>> column_sum_kernels();

}  // namespace quire
