// Routing and permutation on the host: plain C++ for every instruction set.
#pragma once

#include "quire/base/context.h"
#include "quire/spec/moe_problem.h"

namespace quire::cpu {

void route(const RouteProblem& problem, const Context& context);
void route_grad(const RouteGradProblem& problem, const Context& context);
void limit_capacity(const CapacityProblem& problem, const Context& context);
void expert_rows(const ExpertRowsProblem& problem, const Context& context);
void chunk_rows(const ChunkRowsProblem& problem, const Context& context);
void permute(const PermuteProblem& problem, const Context& context);
void unpermute(const UnpermuteProblem& problem, const Context& context);
void permuted_dot(const PermutedDotProblem& problem, const Context& context);

/// Throws Error naming `op` unless id is from -1 to num_experts - 1; place tells which it is.
void check_expert_id(const char* op, int32_t id, int64_t place, int64_t num_experts);

}  // namespace quire::cpu
