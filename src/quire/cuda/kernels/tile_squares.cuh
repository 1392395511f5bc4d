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
      // Lanes that have the same square: of a row, then of the rows of a warp.
      constexpr unsigned along = kSide / kRun, lanes = kRowLanes;
      const Seen<kDType> seen([&](auto& largest) {
        QUIRE_UNROLL
        for (const uint32_t word : words) largest.add(word);
        largest.merge();
        QUIRE_UNROLL
        for (unsigned bit = 1; bit < along; bit *= 2) largest.join(bit);
        QUIRE_UNROLL
        for (unsigned bit = lanes; bit < 32; bit *= 2) largest.join(bit);
      });
      if (threadIdx.x % 32 >= lanes || threadIdx.x % along != 0) return;
      atomicMax(&most[of(row, col)], std::bit_cast<uint32_t>(seen.most.of(0)));
      atomicMax(&all[of(row, col)], std::bit_cast<uint32_t>(seen.all.of(0)));
    });
    __syncthreads();
  }

  /// The scales of a direction. All threads of the block call this, once none needs the other's any more.
  __device__ void find_scales(const TileLines<kSpec, kDType>& lines, const void* tile) {
    const auto thread = static_cast<int>(threadIdx.x);
    if constexpr (lines.kTriesTwo)
      compare_scales(lines, tile);
    else if (thread < kCount)
      set(thread, lines.scale_of(amax(thread), finite(thread)));
    __syncthreads();
  }
  __device__ BlockScale scale(int row, int col) const {
    const int i = of(row, col);
    return {multiplier[i], stored[i], byte[i]};
  }
  /// The largest magnitude of a square, or NaN.
  __device__ float largest(int row, int col) const { return std::bit_cast<float>(all[of(row, col)]); }

 private:
  __device__ float amax(int i) const { return std::bit_cast<float>(most[i]); }
  __device__ bool finite(int i) const { return is_finite(std::bit_cast<float>(all[i])); }
  __device__ void set(int i, const BlockScale& found) {
    multiplier[i] = found.multiplier, stored[i] = found.stored, byte[i] = found.byte;
  }

  /// The better of two scales of each square. Of a square 16 lanes have a line each; they sum as block_error() does.
  __device__ void compare_scales(const TileLines<kSpec, kDType>& lines, const void* tile) {
    static_assert(kSide == kRun);
    const bool rowwise = lines.direction == Direction::rowwise;
    const auto thread = static_cast<int>(threadIdx.x);
    const int line = thread % kSide;
#pragma unroll 1
    for (int i = thread / kSide; i < kCount; i += static_cast<int>(kTileThreads) / kSide) {
      const int row = i / kAlong * kSide + (rowwise ? line : 0), col = i % kAlong * kSide + (rowwise ? 0 : line);
      const auto value = [&](int n) {
        return load_element(tile, kDType, rowwise ? in_tile(row, col + n) : in_tile(row + n, col));
      };
      const auto [map4, map6] = four_over_six_scales(amax(i), lines.global);
      float under4 = lines.error_of(map4, value), under6 = lines.error_of(map6, value);
      QUIRE_UNROLL
      for (unsigned bit = kSide / 2; bit > 0; bit /= 2) {
        under4 += __shfl_xor_sync(~0u, under4, bit);
        under6 += __shfl_xor_sync(~0u, under6, bit);
      }
      if (line == 0) set(i, marked(under4 < under6 ? map4 : map6, lines.spec, finite(i)));
    }
  }
};

}  // namespace quire::cuda
