// Moving rows between the order of tokens and the order of experts (docs/moe.md 2).
#pragma once

#include <cstdint>
#include <span>

#include "quire/base/matrix.h"

namespace quire {

/// Row of the permuted matrix for each slot of each token, [tokens, slots], or -1 for none.
struct RowMap {
  const int32_t* rows = nullptr;
  int64_t tokens = 0;
  int64_t slots = 0;
};

/// to[map(t, s)] = from[t] * weights(t, s), all other rows 0. One dtype: f32, f16, bf16, or without weights also u8.
struct PermuteProblem {
  Matrix from;  ///< [tokens, K]
  RowMap map;
  const float* weights = nullptr;  ///< [tokens, slots] or null: 1
  MutableMatrix to;                ///< [rows, K]
  std::span<int64_t> memory{};     ///< [rows] to work in; empty: allocated
};

/// Throws Error if a row is out of range, or the target of two.
void permute(const PermuteProblem& problem);

/// to[t] = sum over s, in this order and in float32, of weights(t, s) * from[map(t, s)], then rounded.
struct UnpermuteProblem {
  Matrix from;  ///< [rows, K], f32, f16 or bf16
  RowMap map;
  const float* weights = nullptr;  ///< [tokens, slots] or null: 1
  MutableMatrix to;                ///< [tokens, K], of the same dtype
};

/// Throws Error if a row is out of range.
void unpermute(const UnpermuteProblem& problem);

/// to(t, s) = the dot product of permuted[map(t, s)] and tokens[t], 0 where there is none: the gradient of weights.
struct PermutedDotProblem {
  Matrix permuted;  ///< [rows, K]
  Matrix tokens;    ///< [tokens, K]
  RowMap map;
  float* to = nullptr;  ///< [tokens, slots]
};

/// Throws Error if a row is out of range.
void permuted_dot(const PermutedDotProblem& problem);

}  // namespace quire
