// What is asked of the kernels of a mixture of experts: which experts a token goes to, and how rows move between the
// order of tokens and the order of experts (moe-reference.md 1, 2).
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

#include "quire/base/matrix.h"
#include "quire/spec/routing.h"

namespace quire {

/// Rows are numbered in 32 bits.
inline constexpr int64_t kMostRows = std::numeric_limits<int32_t>::max();

struct RouteProblem {
  static constexpr std::string_view kOp = "route";
  Routing routing;
  Matrix logits;                ///< [T, E], f32, f16 or bf16
  const float* bias = nullptr;  ///< [E] or null: added to the scores that experts are chosen by
  float* weights = nullptr;     ///< [T, topk]
  int32_t* ids = nullptr;       ///< [T, topk]: best first, of equal ones the smaller number first
};

/// The gradient of the weights with respect to the logits; choices are constants.
struct RouteGradProblem {
  static constexpr std::string_view kOp = "route_grad";
  Routing routing;
  Matrix logits;
  const int32_t* ids = nullptr;     ///< [T, topk], as route() gave them
  const float* dweights = nullptr;  ///< [T, topk]
  MutableMatrix dlogits;            ///< [T, E]
};

/// kept[i] = ids[i], or -1 where `capacity` earlier ones are the same expert. Ids are from -1 to num_experts - 1, and
/// -1 stays -1.
struct CapacityProblem {
  static constexpr std::string_view kOp = "limit_capacity";
  const int32_t* ids = nullptr;  ///< [count]
  int64_t count = 0;
  int64_t num_experts = 0;
  int64_t capacity = 0;
  int32_t* kept = nullptr;  ///< [count]
};

/// Row of the permuted matrix for each slot of each token, [tokens, slots], or -1 for none.
struct RowMap {
  const int32_t* rows = nullptr;
  int64_t tokens = 0;
  int64_t slots = 0;
};

/// to[map(t, s)] = from[t] * weights(t, s), all other rows 0. One dtype: f32, f16, bf16, or without weights also u8.
struct PermuteProblem {
  static constexpr std::string_view kOp = "permute";
  Matrix from;  ///< [tokens, K]
  RowMap map;
  const float* weights = nullptr;  ///< [tokens, slots] or null: 1
  MutableMatrix to;                ///< [rows, K]
};

/// to[t] = sum over s, in this order and in float32, of weights(t, s) * from[map(t, s)], then rounded.
struct UnpermuteProblem {
  static constexpr std::string_view kOp = "unpermute";
  Matrix from;  ///< [rows, K], f32, f16 or bf16
  RowMap map;
  const float* weights = nullptr;  ///< [tokens, slots] or null: 1
  MutableMatrix to;                ///< [tokens, K], of the same dtype
};

/// to(t, s) = the dot product of permuted[map(t, s)] and tokens[t], 0 where there is none: the gradient of weights.
struct PermutedDotProblem {
  static constexpr std::string_view kOp = "unpermute_dot";
  Matrix permuted;  ///< [rows, K]
  Matrix tokens;    ///< [tokens, K]
  RowMap map;
  float* to = nullptr;  ///< [tokens, slots]
};

/// Sorts the places of `ids` by expert, stably: row_map[i] is the rank of place i, or -1 where ids[i] is -1, and
/// offsets[e] the number of places whose expert is at most e.
struct ExpertRowsProblem {
  static constexpr std::string_view kOp = "expert_rows";
  const int32_t* ids = nullptr;  ///< [count], from -1 to the number of experts - 1
  int64_t count = 0;
  int32_t* row_map = nullptr;  ///< [count]
  int32_t* offsets = nullptr;  ///< [num_experts]
  int64_t num_experts = 0;     ///< 0: not known, and no offsets
};

/// Moves chunks of consecutive rows: row_map[i] is where row i goes when the chunks stand one after the other in
/// another order, each beginning at a multiple of `align`. Rows after the last chunk follow the last chunk.
struct ChunkRowsProblem {
  static constexpr std::string_view kOp = "chunk_rows";
  Integers sizes;    ///< of the chunks
  Integers order{};  ///< which chunk comes first, second, ...; count 0: as they are
  int64_t align = 1;
  int32_t* row_map = nullptr;  ///< [rows]
  int64_t rows = 0;
};

std::string to_string(const RouteProblem& p);
std::string to_string(const RouteGradProblem& p);
std::string to_string(const CapacityProblem& p);
std::string to_string(const PermuteProblem& p);
std::string to_string(const UnpermuteProblem& p);
std::string to_string(const PermutedDotProblem& p);
std::string to_string(const ExpertRowsProblem& p);
std::string to_string(const ChunkRowsProblem& p);

}  // namespace quire
