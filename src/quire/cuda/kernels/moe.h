// What the host asks the kernels of moe.cu for.
#pragma once

#include <cstddef>

#include "quire/cuda/kernels/fault_site.h"
#include "quire/spec/moe_problem.h"

namespace quire::cuda {

/// A thread for each token, or a warp.
struct RouteJob {
  RouteProblem problem;
  std::byte* memory;  ///< Router::bytes() for each thread; not for warps
};

struct RouteGradJob {
  RouteGradProblem problem;
  std::byte* memory;  ///< RouterGrad::bytes() for each thread
  FaultSite site;
};

/// Shared memory of a warp that routes a token.
constexpr int64_t warp_bytes(const RouteProblem& p) { return 4 * (2 * p.logits.cols + p.routing.num_groups); }
constexpr int64_t warp_bytes(const RouteGradProblem& p) { return 4 * 2 * p.logits.cols; }

/// How places are cut into chunks, a warp for each, and how many places of each expert they have.
struct ChunkCounts {
  int64_t chunk = 0, chunks = 0;  ///< places of each, and how many of them
  int64_t* counts = nullptr;      ///< [experts, chunks], 0 at first: of a chunk, then of all before it, then of all
};

/// The rank of each place of `ids` among those of its expert, in the order of places.
struct RankJob {
  const int32_t* ids = nullptr;  ///< [count]
  int64_t count = 0;
  int64_t experts = 0;        ///< how many there are; negative: as `most` says
  uint32_t* most = nullptr;   ///< one more than the largest id, 0 at first
  ChunkCounts of_chunks{};    ///< for one block: without memory
  int64_t* starts = nullptr;  ///< [experts] or null: places of an expert, then of all experts before it
  FaultSite site{};

  // Results.
  int32_t* row_map = nullptr;  ///< of ExpertRowsProblem
  int32_t* offsets = nullptr;
  int32_t* kept = nullptr;  ///< of CapacityProblem
  int64_t capacity = 0;
};

/// Shared memory of one block that ranks all places: counts, and starts.
constexpr int64_t block_bytes(const RankJob& job) { return 8 * job.experts * (job.of_chunks.chunks + 1); }

struct ChunkJob {
  ChunkRowsProblem problem;
  int64_t* begins;  ///< [chunks + 1]: the first row of each, then of what follows them
  int64_t* starts;  ///< [chunks + 1]: where each goes, then the rest; -1 there: nowhere, because a rule is broken
  unsigned* seen;   ///< [chunks], 0 at first: whether the order has named it
  FaultSite site;
};

/// Rows are moved in segments, a warp for each.
struct Segments {
  static constexpr int64_t kPieces = 4;  ///< of each lane

  int64_t pieces;    ///< of a row
  int64_t segments;  ///< of a row

  constexpr explicit Segments(int64_t count) : pieces(count), segments((count + kPieces * 32 - 1) / (kPieces * 32)) {}
};

struct PermuteJob {
  PermuteProblem problem;
  int64_t unit;     ///< bytes that are copied at once; with weights those of an element
  Segments row;     ///< in units
  int64_t* source;  ///< [rows]: the place of the map that goes there, -1 at first
  FaultSite site;
};

struct UnpermuteJob {
  UnpermuteProblem problem;
  Segments row;  ///< in elements
  FaultSite site;
};

struct PermutedDotJob {
  PermutedDotProblem problem;
  FaultSite site;
};

}  // namespace quire::cuda
