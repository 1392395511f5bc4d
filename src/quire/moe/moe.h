// What a mixture of experts needs beside products (docs/moe.md 1, 2). All throw Error on a problem that breaks a rule.
// Errors that depend on values of tensors (ids and rows out of range) are found by the kernels (base/fault.h): on the
// host at once, on another device later.
#pragma once

#include "quire/base/context.h"
#include "quire/spec/moe_problem.h"

namespace quire {

/// Which experts a token goes to and with what weights.
void route(const RouteProblem& problem, const Context& context = host());
void route_grad(const RouteGradProblem& problem, const Context& context = host());
void limit_capacity(const CapacityProblem& problem, const Context& context = host());

/// Where rows go when tokens are grouped by expert, and when groups of rows move.
void expert_rows(const ExpertRowsProblem& problem, const Context& context = host());
void chunk_rows(const ChunkRowsProblem& problem, const Context& context = host());

/// Moving them there, back again, and the gradient of the weights.
void permute(const PermuteProblem& problem, const Context& context = host());
void unpermute(const UnpermuteProblem& problem, const Context& context = host());
void permuted_dot(const PermutedDotProblem& problem, const Context& context = host());

}  // namespace quire
