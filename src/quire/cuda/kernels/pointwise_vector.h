// What the host asks the kernels of pointwise_vector.cu for: those of pointwise.h, where memory is aligned to 16 bytes
// and the large matrices are of one dtype.
#pragma once

#include "quire/cuda/kernels/pointwise.h"

namespace quire::cuda {

/// Elements that a thread loads or stores together.
inline constexpr int64_t kVector = 8;

/// Rows that a warp keeps in shared memory, 16 lanes for each.
inline constexpr int64_t kWarpRows = 2;

/// The shared memory of a block of warps, each of which has kWarpRows rows of some matrices.
struct RowMemory {
  int64_t stride = 0;  ///< elements between two rows
  int64_t warps = 1;   ///< of a block

  /// Of rows of `cols` elements. Two rows lie such that the lanes of one meet those of the other in no bank.
  static constexpr int64_t stride_of(int64_t cols, DType dtype) {
    const int64_t line = 128 / size_of(dtype);
    return (cols + line - 1) / line * line + kRowSums;
  }
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
