// Every operation of the core: validate the problem, choose a kernel of the context's device, run it
// (device/dispatch.h). All throw Error on a problem that breaks a rule; nothing has been written then. Errors that
// depend on values in memory are found by the kernels: on the host at once, on another device later (base/fault.h).
// What a result is, and how far it may be from the exact one, stands beside its problem (quire/spec).
#pragma once

#include <string>

#include "quire/device/dispatch.h"
#include "quire/spec/statistics.h"

namespace quire {

/// One line per kernel row, "NAME: VERDICT": "runs", why it cannot take the problem, or which row comes before it.
template <class Problem>
std::string explain(const Problem& problem, const Context& context = host()) {
  return explain_choice(problem, context);
}

// ---- codes and scales

inline void quantize(const QuantizeProblem& problem, const Context& context = host()) { dispatch(problem, context); }
inline void amax(const AmaxProblem& problem, const Context& context = host()) { dispatch(problem, context); }
inline void dequantize(const DequantizeProblem& problem, const Context& context = host()) {
  dispatch(problem, context);
}
inline void reorder(const ReorderProblem& problem, const Context& context = host()) { dispatch(problem, context); }

/// Counts the elements of a present side of a problem that quantize() has run on the host. Slow: it computes all scales
/// again.
Statistics statistics(const QuantizeProblem& problem, Direction direction);

// ---- matrices

inline void gemm(const GemmProblem& problem, const Context& context = host()) { dispatch(problem, context); }
inline void matmul(const MatmulProblem& problem, const Context& context = host()) { dispatch(problem, context); }
inline void column_sum(const ColumnSumProblem& problem, const Context& context = host()) { dispatch(problem, context); }

// ---- between matrices (numerics.md 11)

inline void norm(const NormProblem& problem, const Context& context = host()) { produce(problem, context); }
inline void norm_grad(const NormGradProblem& problem, const Context& context = host()) { dispatch(problem, context); }
inline void activation(const ActivationProblem& problem, const Context& context = host()) { produce(problem, context); }
inline void activation_grad(const ActivationGradProblem& problem, const Context& context = host()) {
  dispatch(problem, context);
}

// ---- mixtures of experts (moe-reference.md 1, 2)

inline void route(const RouteProblem& problem, const Context& context = host()) { dispatch(problem, context); }
inline void route_grad(const RouteGradProblem& problem, const Context& context = host()) { dispatch(problem, context); }
inline void limit_capacity(const CapacityProblem& problem, const Context& context = host()) {
  dispatch(problem, context);
}
inline void expert_rows(const ExpertRowsProblem& problem, const Context& context = host()) {
  dispatch(problem, context);
}
inline void chunk_rows(const ChunkRowsProblem& problem, const Context& context = host()) { dispatch(problem, context); }
inline void permute(const PermuteProblem& problem, const Context& context = host()) { dispatch(problem, context); }
inline void unpermute(const UnpermuteProblem& problem, const Context& context = host()) { dispatch(problem, context); }
inline void permuted_dot(const PermutedDotProblem& problem, const Context& context = host()) {
  dispatch(problem, context);
}

// ---- what a module keeps between steps

inline void fingerprint(const FingerprintProblem& problem, const Context& context = host()) {
  dispatch(problem, context);
}
/// The fingerprint of a matrix in the host's memory.
uint64_t fingerprint(const Matrix& x);
inline void advance(const AdvanceProblem& problem, const Context& context = host()) { dispatch(problem, context); }
inline void maximum(const MaximumProblem& problem, const Context& context = host()) { dispatch(problem, context); }
inline void delayed_collect(const CollectProblem& problem, const Context& context = host()) {
  dispatch(problem, context);
}
inline void delayed_update(const DelayedUpdateProblem& problem, const Context& context = host()) {
  dispatch(problem, context);
}

}  // namespace quire
