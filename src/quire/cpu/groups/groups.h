// The host's kernels for groups of rows: they read the ends, cut a problem into those of its groups, and give each to
// the kernel that takes it. All are checked before the first one runs. Groups of unequal rows are balanced over the
// threads.
#pragma once

#include "quire/base/context.h"
#include "quire/spec/grouped_problem.h"

namespace quire::cpu {

void grouped_quantize(const GroupedQuantizeProblem& problem, const Context& context);
void grouped_amax(const GroupedAmaxProblem& problem, const Context& context);
void grouped_dequantize(const GroupedDequantizeProblem& problem, const Context& context);
void grouped_gemm(const GroupedGemmProblem& problem, const Context& context);
void grouped_matmul(const GroupedMatmulProblem& problem, const Context& context);
void grouped_column_sum(const GroupedColumnSumProblem& problem, const Context& context);
void grouped_activation(const GroupedActivationProblem& problem, const Context& context);
void grouped_fingerprint(const GroupedFingerprintProblem& problem, const Context& context);

}  // namespace quire::cpu
