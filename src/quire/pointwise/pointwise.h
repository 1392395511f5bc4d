// What runs between products, norms and activation functions: validate, choose a kernel, run. Every bit is defined by
// numerics.md 11: it depends neither on the instruction set nor on the number of threads.
#pragma once

#include <string>

#include "quire/base/context.h"
#include "quire/spec/pointwise_problem.h"

namespace quire {

/// The norm of every row, mean and rstd for its gradient, and the quantization of the result. Throws Error on a problem
/// that breaks a rule; nothing has been written then.
void norm(const NormProblem& problem, const Context& context = host());
/// Gradients with respect to x, gamma and beta; sums over rows are those of column_sum (numerics.md 6.6).
void norm_grad(const NormGradProblem& problem, const Context& context = host());

/// The activation of every element, and the quantization of the result.
void activation(const ActivationProblem& problem, const Context& context = host());
void activation_grad(const ActivationGradProblem& problem, const Context& context = host());

/// One line per kernel row, as for quantize. A problem and its gradient are forced by one name, `norm:NAME`.
std::string explain(const NormProblem& problem, const Context& context = host());
std::string explain(const NormGradProblem& problem, const Context& context = host());
std::string explain(const ActivationProblem& problem, const Context& context = host());
std::string explain(const ActivationGradProblem& problem, const Context& context = host());

}  // namespace quire
