// What the host asks the kernels of pointwise.cu for.
#pragma once

#include "quire/cuda/kernels/groups.h"
#include "quire/spec/norm.h"

namespace quire::cuda {

/// A norm whose y, mean (of LayerNorm) and rstd have memory. NormProblem and NormGradProblem are parameters as they
/// are.
struct ActivationJob {
  Activation activation;
  Matrix x;
  MutableMatrix y;
  Places groups;
};

/// Where the sums of chunks of columns lie: of each group as many lines of `cols` numbers as it has chunks. Where each
/// group's begin follows from where its rows do, so that nobody has to count.
struct ChunkLines {
  Places groups;
  int64_t cols;

  /// Those of all groups, some of which hold nothing.
  constexpr int64_t count() const { return groups.rows / kColumnChunk + groups.count; }
  /// The first line of a group.
  static constexpr int64_t first(const GroupPlace& place, int64_t group) { return place.begin / kColumnChunk + group; }
  /// The group that a line belongs to. Follows pointers: for kernels.
  constexpr int64_t group_of(int64_t line) const {
    int64_t low = 0, high = groups.count;  // the last one that does not begin behind it
    while (high - low > 1) {
      const int64_t middle = low + (high - low) / 2;
      (first(groups[middle], middle) <= line ? low : high) = middle;
    }
    return low;
  }
};

/// Sums over rows: in `chunks` those of chunks, [lines.count(), cols], then in `out` those of groups, [groups, cols].
struct ColumnSumJob {
  Matrix x;
  void* out;
  DType dtype;  ///< of out
  ChunkLines lines;
  float* chunks;
};

/// The same of dgamma and dbeta, each where it is wanted.
struct GammaJob {
  NormGradProblem problem;
  ChunkLines lines;
  float *gamma_chunks, *beta_chunks;
};

}  // namespace quire::cuda
