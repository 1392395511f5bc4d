// What the host asks the kernels of norm_vector.cu for: norms, where memory is aligned to 16 bytes and the large
// matrices are of one dtype.
#pragma once

#include "quire/spec/norm.h"

namespace quire::cuda {

/// Rows that a warp keeps in shared memory, 16 lanes for each.
inline constexpr int64_t kWarpRows = 2;

/// The shared memory of a block of warps: the gain of each column, and for each warp kWarpRows rows of some matrices.
struct RowMemory {
  int64_t stride = 0;  ///< elements between two rows
  int64_t warps = 1;   ///< of a block

  /// Of rows of `cols` elements. Two rows lie such that the lanes of one meet those of the other in no bank.
  static constexpr int64_t stride_of(int64_t cols, DType dtype) {
    const int64_t line = 128 / size_of(dtype);
    return (cols + line - 1) / line * line + kRowSums;
  }
  /// Those of `cols` columns, in whole lines of 128 bytes.
  static constexpr int64_t bytes_of_gains(int64_t cols) { return (cols + 31) / 32 * 128; }
};

struct NormVectorJob {
  NormProblem problem;
  RowMemory memory;
};

/// dx of the problem.
struct NormGradVectorJob {
  NormGradProblem problem;
  RowMemory memory;
};

}  // namespace quire::cuda
