#include "quire/pointwise/pointwise.h"

#include "quire/device/producer.h"

namespace quire {

void norm(const NormProblem& problem, const Context& context) {
  check_problem(problem);
  run_producer(problem, context);
}
void norm_grad(const NormGradProblem& problem, const Context& context) { dispatch(problem, context); }

void activation(const ActivationProblem& problem, const Context& context) {
  check_problem(problem);
  run_producer(problem, context);
}
void activation_grad(const ActivationGradProblem& problem, const Context& context) { dispatch(problem, context); }

std::string explain(const NormProblem& problem, const Context& context) { return explain_choice(problem, context); }
std::string explain(const NormGradProblem& problem, const Context& context) { return explain_choice(problem, context); }
std::string explain(const ActivationProblem& problem, const Context& context) {
  return explain_choice(problem, context);
}
std::string explain(const ActivationGradProblem& problem, const Context& context) {
  return explain_choice(problem, context);
}

}  // namespace quire
