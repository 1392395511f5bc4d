// Squares of a tile: blocks of as many lines as values. Both directions have their scales.
#pragma once

#include "quire/cuda/kernels/tile_lines.cuh"

namespace quire::cuda {

/// What the squares of a tile have, in shared memory; and the scales of one direction after the other, which differ
/// only where the caller gives amaxes. The tile, which follows it in shared memory, is read 16 bytes at a time.
template <QuantSpec kSpec, DType kDType>
struct alignas(16) Squares {
  static constexpr int kSide = static_cast<int>(kSpec.square ? kSpec.row().block : kTile);
  static constexpr int kAlong = static_cast<int>(kTile) / kSide, kCount = kAlong * kAlong;

  uint32_t most[kCount], all[kCount];  ///< bits of Seen's
  float multiplier[kCount], stored[kCount];
  uint8_t byte[kCount];

  static __device__ int of(int row, int col) { return row / kSide * kAlong + col / kSide; }

  /// Reads the tile, keeps it, and measures. All threads of the block call this.
  __device__ void measure(const TileWork& tile) {
    for (int i = static_cast<int>(threadIdx.x); i < kCount; i += static_cast<int>(kTileThreads)) most[i] = all[i] = 0;
    __syncthreads();
    each_run<kDType>(tile.x, tile.place, [&](int row, int col, const auto& words) {
      keep<kDType>(tile.memory, row, col, words);
      Seen<kDType> seen;
      seen.add(words, tile.spec.nan);
      seen.merge(tile.spec.nan);
      // Lanes that have the same square: of a row, then of the rows of a warp.
      constexpr unsigned along = kSide / kRun, lanes = kRowLanes;
      QUIRE_UNROLL
      for (unsigned bit = 1; bit < along; bit *= 2) seen.join(bit, tile.spec.nan);
      QUIRE_UNROLL
      for (unsigned bit = lanes; bit < 32; bit *= 2) seen.join(bit, tile.spec.nan);
      if (threadIdx.x % 32 >= lanes || threadIdx.x % along != 0) return;
      atomicMax(&most[of(row, col)], std::bit_cast<uint32_t>(seen.amax(0)));
      if (tile.spec.nan) atomicMax(&all[of(row, col)], std::bit_cast<uint32_t>(seen.total(0)));
    });
    __syncthreads();
  }

  /// The scales of a direction. All threads of the block call this, once none needs the other's any more.
  __device__ void find_scales(const TileLines<kSpec, kDType>& lines) {
    const auto i = static_cast<int>(threadIdx.x);
    if (i < kCount) {
      const BlockScale found = lines.scale_of(std::bit_cast<float>(most[i]), is_finite(std::bit_cast<float>(all[i])));
      multiplier[i] = found.multiplier, stored[i] = found.stored, byte[i] = found.byte;
    }
    __syncthreads();
  }
  __device__ BlockScale scale(int row, int col) const {
    const int i = of(row, col);
    return {multiplier[i], stored[i], byte[i]};
  }
};

}  // namespace quire::cuda
