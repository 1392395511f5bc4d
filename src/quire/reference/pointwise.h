// The contract of norms and activations transcribed: the last row of their kernel tables (numerics.md 11).
#pragma once

#include "quire/spec/pointwise_problem.h"

namespace quire::reference {

void norm(const NormProblem& problem);
void norm_grad(const NormGradProblem& problem);
void activation(const ActivationProblem& problem);
void activation_grad(const ActivationGradProblem& problem);

}  // namespace quire::reference
