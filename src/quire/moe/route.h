// Routing: which experts a token goes to and with what weights (docs/moe.md 1).
#pragma once

#include "quire/base/matrix.h"
#include "quire/moe/routing.h"

namespace quire {

struct RouteProblem {
  Routing routing;
  Matrix logits;                ///< [T, E], f32, f16 or bf16
  const float* bias = nullptr;  ///< [E] or null: added to the scores that experts are chosen by
  float* weights = nullptr;     ///< [T, topk]
  int32_t* ids = nullptr;       ///< [T, topk]: best first, of equal ones the smaller number first
};

/// Throws Error unless the routing fits the number of experts.
void route(const RouteProblem& problem);

/// The gradient of the weights with respect to the logits; choices are constants.
struct RouteGradProblem {
  Routing routing;
  Matrix logits;
  const int32_t* ids = nullptr;     ///< [T, topk], as route() gave them
  const float* dweights = nullptr;  ///< [T, topk]
  MutableMatrix dlogits;            ///< [T, E]
};

/// Throws Error for ids that are no experts.
void route_grad(const RouteGradProblem& problem);

/// kept[i] = ids[i], or -1 where `capacity` earlier ones are the same expert. Ids are from -1 to num_experts - 1, and
/// -1 stays -1; throws Error for others.
void limit_capacity(const int32_t* ids, int64_t count, int64_t num_experts, int64_t capacity, int32_t* kept);

/// Throws Error naming `op` unless id is from -1 to num_experts - 1; place tells which it is.
void check_expert_id(const char* op, int32_t id, int64_t place, int64_t num_experts);

}  // namespace quire
