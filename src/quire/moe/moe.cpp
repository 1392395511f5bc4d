#include "quire/moe/moe.h"

#include "quire/device/dispatch.h"

namespace quire {

void route(const RouteProblem& problem, const Context& context) { dispatch(problem, context); }
void route_grad(const RouteGradProblem& problem, const Context& context) { dispatch(problem, context); }
void limit_capacity(const CapacityProblem& problem, const Context& context) { dispatch(problem, context); }

void expert_rows(const ExpertRowsProblem& problem, const Context& context) { dispatch(problem, context); }
void chunk_rows(const ChunkRowsProblem& problem, const Context& context) { dispatch(problem, context); }

void permute(const PermuteProblem& problem, const Context& context) { dispatch(problem, context); }
void unpermute(const UnpermuteProblem& problem, const Context& context) { dispatch(problem, context); }
void permuted_dot(const PermutedDotProblem& problem, const Context& context) { dispatch(problem, context); }

}  // namespace quire
