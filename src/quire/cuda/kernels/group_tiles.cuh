// The tiles of the outputs of all groups, which blocks of threads take in turns.
#pragma once

#include "quire/cuda/kernels/groups.cuh"

namespace quire::cuda {

/// Where a block works: its tiles are every gridDim.x-th one, so that no block waits for groups that are empty.
/// Neighbouring tiles, which blocks have at the same time, lie in kStrip rows of tiles: they read the same lines.
template <int kRows, int kCols>
class GroupTiles {
 public:
  /// `rows`: of each group's output, where they are not the group's.
  __device__ GroupTiles(const Places& groups, int64_t cols, int64_t rows = -1)
      : groups_(groups), across_(ceil_div(cols, int64_t{kCols})), rows_(rows) {}

  /// Goes to tile number `t` of all, which is beyond the one before. False: there are no more.
  __device__ bool find(int64_t t) {
    for (; group < groups_.count; ++group) {
      const int64_t down = ceil_div(rows_ < 0 ? groups_[group].rows : rows_, int64_t{kRows});
      if (t - before_ < down * across_) {
        place(t - before_, down);
        return true;
      }
      before_ += down * across_;
    }
    return false;
  }

  int64_t group = 0, row = 0, col = 0;

 private:
  static constexpr int64_t kStrip = 16;

  __device__ void place(int64_t t, int64_t down) {
    const int64_t first = t / (kStrip * across_) * kStrip, in_strip = t - first * across_;
    const int64_t height = down - first < kStrip ? down - first : kStrip;
    row = (first + in_strip % height) * kRows, col = in_strip / height * kCols;
  }

  const Places& groups_;
  int64_t across_, rows_, before_ = 0;
};

}  // namespace quire::cuda
