// The host's kernels cut problems of groups: they read the ends, make the problem of each group's tensor, and give each
// to the kernel that takes it. All are checked before the first one runs. Groups of unequal rows are balanced over the
// threads.
#pragma once

#include "quire/base/context.h"
#include "quire/spec/pointwise_problem.h"
#include "quire/spec/problem.h"
#include "quire/spec/state_problem.h"

namespace quire::cpu {

void run_groups(const QuantizeProblem& problem, const Context& context);
void run_groups(const AmaxProblem& problem, const Context& context);
void run_groups(const DequantizeProblem& problem, const Context& context);
void run_groups(const GemmProblem& problem, const Context& context);
void run_groups(const MatmulProblem& problem, const Context& context);
void run_groups(const ColumnSumProblem& problem, const Context& context);
void run_groups(const ActivationProblem& problem, const Context& context);
void run_groups(const ActivationGradProblem& problem, const Context& context);
void run_groups(const FingerprintProblem& problem, const Context& context);

}  // namespace quire::cpu
