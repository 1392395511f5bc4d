// The outputs of a tile of a product by tensor cores: how a block's warps share them.
#pragma once

#include "quire/cuda/kernels/tensor.cuh"
#include "quire/cuda/kernels/threads.cuh"

namespace quire::cuda {

/// Sums of a thread, of kTile x kTile outputs of a block of 2 kTile threads: those of a cut, and of the cuts before it.
template <int kTile>
struct TensorSums {
  /// Of a warp: matrices of 16 rows, and of 8 columns.
  static constexpr int kDown = kTile / 32, kAcross = 4;

  float cut[kDown][kAcross][4] = {}, all[kDown][kAcross][4] = {};

  /// Where this warp's outputs begin in the tile, and where its lane's ones lie.
  static __device__ int down() { return static_cast<int>(threadIdx.x) / 32 % 2 * (kTile / 2); }
  static __device__ int across() { return static_cast<int>(threadIdx.x) / 64 * (8 * kAcross); }
  static __device__ int line_of(int m, int e) { return down() + m * 16 + lane() / 4 + e / 2 * 8; }
  static __device__ int column_of(int n, int e) { return across() + n * 8 + lane() % 4 * 2 + e % 2; }

  __device__ void end_cut() {
#pragma unroll
    for (int m = 0; m < kDown; ++m)
#pragma unroll
      for (int n = 0; n < kAcross; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) all[m][n][e] += cut[m][n][e], cut[m][n][e] = 0;
  }

  /// The column of the tile that store() gives to this thread.
  static __device__ int stored_column() { return across() + lane(); }
  /// Calls each(line, sum) along the rows, by all threads; 16 rows of a warp at a time lie in `memory`, which nobody
  /// uses any more.
  template <class Each>
  __device__ void store(void* memory, const Each& each) const {
    auto* const rows = static_cast<Row*>(memory) + threadIdx.x / 32 * 16;
    __syncthreads();  // nobody multiplies any more
#pragma unroll
    for (int m = 0; m < kDown; ++m) {
      if (m > 0) __syncwarp();
#pragma unroll
      for (int n = 0; n < kAcross; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) rows[lane() / 4 + e / 2 * 8][n * 8 + lane() % 4 * 2 + e % 2] = all[m][n][e];
      __syncwarp();
#pragma unroll 1
      for (int r = 0; r < 16; ++r) each(down() + m * 16 + r, rows[r][lane()]);
    }
  }
  /// Bytes of its memory.
  static constexpr size_t stored_bytes() { return kTile / 16 * 16 * sizeof(Row); }

 private:
  /// Outputs of a row of a warp. One more, so that rows begin in different banks.
  using Row = float[8 * kAcross + 1];
  static_assert(8 * kAcross == kWarp);
};

}  // namespace quire::cuda
