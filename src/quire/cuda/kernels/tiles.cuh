// Tiles of a matrix, read 16 values a thread and kept in shared memory; values stay in words as they were read, two of
// 16 bits together.
#pragma once

#include "quire/cuda/kernels/groups.cuh"
#include "quire/cuda/kernels/pairs.cuh"
#include "quire/cuda/kernels/tiles.h"
#include "quire/spec/scale.h"
#include "quire/spec/value_lines.h"

namespace quire::cuda {

/// Values that a thread reads together, along a row or a column.
inline constexpr int kRun = kValueGroup;

template <DType kDType>
inline constexpr int kWords = kRun * static_cast<int>(size_of(kDType)) / 4;  ///< of a run

/// A value of words.
template <DType kDType, size_t kCount>
__device__ float value_at(const std::array<uint32_t, kCount>& words, int i) {
  if constexpr (kDType == DType::f32) return std::bit_cast<float>(words[i]);
  const uint32_t pair = words[i / 2];
  if constexpr (kDType == DType::bf16) return std::bit_cast<float>(i % 2 ? pair & 0xFFFF0000u : pair << 16);
  const auto half = static_cast<uint16_t>(i % 2 ? pair >> 16 : pair);
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
  return value;
}

/// The larger magnitudes of two words of them, NaN only if both are, and what is NaN if one of them is.
template <DType kDType>
__device__ uint32_t larger(uint32_t a, uint32_t b) {
  uint32_t c;
  if constexpr (kDType == DType::f32) asm("max.f32 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  if constexpr (kDType == DType::f16) asm("max.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  if constexpr (kDType == DType::bf16) asm("max.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}
template <DType kDType>
__device__ uint32_t larger_or_nan(uint32_t a, uint32_t b) {
  uint32_t c;
  if constexpr (kDType == DType::f32) asm("max.NaN.f32 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  if constexpr (kDType == DType::f16) asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  if constexpr (kDType == DType::bf16) asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}

/// What scales follow from, of as many series of values as a word has.
template <DType kDType>
struct Seen {
  static constexpr uint32_t kMagnitudes = kDType == DType::f32 ? 0x7FFFFFFFu : 0x7FFF7FFFu;

  uint32_t most = 0;  ///< magnitudes, NaN left out
  uint32_t all = 0;   ///< the same with NaN, where that is asked for

  __device__ void add(uint32_t word) { most = larger<kDType>(most, word & kMagnitudes); }
  __device__ void add_to_all(uint32_t word) { all = larger_or_nan<kDType>(all, word & kMagnitudes); }
  template <size_t kCount>
  __device__ void add(const std::array<uint32_t, kCount>& words, bool nan) {
    QUIRE_UNROLL
    for (const uint32_t word : words) add(word);
    if (!nan) return;
    QUIRE_UNROLL
    for (const uint32_t word : words) add_to_all(word);
  }

  /// Takes what the lanes have that differ in one bit of their numbers; every lane of the warp calls this.
  __device__ void join(unsigned bit, bool nan) {
    most = larger<kDType>(most, __shfl_xor_sync(~0u, most, bit));
    if (nan) all = larger_or_nan<kDType>(all, __shfl_xor_sync(~0u, all, bit));
  }

  __device__ float amax(int series) const { return value_at<kDType>(std::array{most}, series); }
  __device__ float total(int series) const { return value_at<kDType>(std::array{all}, series); }
  __device__ bool finite(int series) const { return is_finite(total(series)); }
  /// Of all series, which are one then.
  __device__ void merge(bool nan) {
    if constexpr (kDType == DType::f32) return;
    most = larger<kDType>(most, most >> 16);
    if (nan) all = larger_or_nan<kDType>(all, all >> 16);
  }
};

/// 16 values of a row, from `valid` on zeros.
template <DType kDType>
__device__ std::array<uint32_t, kWords<kDType>> read_run(const void* data, int64_t at, int64_t valid) {
  using Raw = std::conditional_t<kDType == DType::f32, uint32_t, uint16_t>;
  const Raw* const from = static_cast<const Raw*>(data) + at;
  std::array<uint32_t, kWords<kDType>> words{};
  if (valid >= kRun && reinterpret_cast<uintptr_t>(from) % sizeof(uint4) == 0) {
    QUIRE_UNROLL
    for (int i = 0; i < kWords<kDType> / 4; ++i) {
      const uint4 four = reinterpret_cast<const uint4*>(from)[i];
      words[4 * i] = four.x, words[4 * i + 1] = four.y, words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
    }
    return words;
  }
  constexpr int per_word = kRun / kWords<kDType>;
  QUIRE_UNROLL
  for (int i = 0; i < kRun; ++i)
    if (i < valid) words[i / per_word] |= static_cast<uint32_t>(from[i]) << i % per_word * 16;
  return words;
}

/// Where a block of threads works: a tile of a group. Each takes one, of as many as tiles_of() says.
struct TilePlace {
  int64_t group = -1;  ///< none: there are no more tiles
  int64_t row = 0, col = 0;

  /// Blocks go along rows of tiles, then through the groups.
  __device__ TilePlace(const Places& groups, int64_t cols) {
    const int64_t along = ceil_div(cols, kTile);
    int64_t left = int64_t{blockIdx.x} / along;
    for (int64_t e = 0; e < groups.count; ++e) {
      const int64_t tiles = ceil_div(groups[e].rows, kTile);
      if (left < tiles) {
        group = e, row = left * kTile, col = int64_t{blockIdx.x} % along * kTile;
        return;
      }
      left -= tiles;
    }
  }
  __device__ bool first() const { return row == 0 && col == 0; }
};

/// Where value (row, col) of a tile lies in its shared memory (tile_bytes).
__device__ inline int in_tile(int row, int col) { return row * static_cast<int>(kTile) + row / 16 * 8 + col; }

/// Lanes that have the runs of a row of a tile.
inline constexpr int kRowLanes = static_cast<int>(kTile) / kRun;

/// Calls each(row, col) for the runs of rows of a tile that this thread has. Every lane of a warp is called as often,
/// and kRowLanes consecutive lanes have a whole row.
template <class Each>
__device__ void each_place(Each&& each) {
  constexpr int rows = static_cast<int>(kTileThreads) / kRowLanes;
  const int col = static_cast<int>(threadIdx.x) % kRowLanes * kRun;
#pragma unroll 1
  for (int row = static_cast<int>(threadIdx.x) / kRowLanes; row < kTile; row += rows) each(row, col);
}

/// The same with the values: each(row, col, words).
template <DType kDType, class Each>
__device__ void each_run(const Matrix& x, const TilePlace& place, Each&& each) {
  each_place([&](int row, int col) {
    const int64_t line = place.row + row;
    each(row, col,
         read_run<kDType>(x.data, line * x.row_stride + place.col + col, line < x.rows ? x.cols - place.col - col : 0));
  });
}

/// Keeps a run of a row in the tile's shared memory.
template <DType kDType>
__device__ void keep(void* tile, int row, int col, const std::array<uint32_t, kWords<kDType>>& words) {
  auto* const to = reinterpret_cast<uint4*>(static_cast<char*>(tile) + in_tile(row, col) * size_of(kDType));
  QUIRE_UNROLL
  for (int i = 0; i < kWords<kDType> / 4; ++i)
    to[i] = {words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]};
}

/// A run of a row that was kept.
template <DType kDType>
__device__ std::array<uint32_t, kWords<kDType>> kept(const void* tile, int row, int col) {
  const auto* const from =
      reinterpret_cast<const uint4*>(static_cast<const char*>(tile) + in_tile(row, col) * size_of(kDType));
  std::array<uint32_t, kWords<kDType>> words;
  QUIRE_UNROLL
  for (int i = 0; i < kWords<kDType> / 4; ++i) {
    const uint4 four = from[i];
    words[4 * i] = four.x, words[4 * i + 1] = four.y, words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
  }
  return words;
}

/// kCols columns of 16 rows of a tile: words of a row, row by row.
template <DType kDType, int kCols>
struct Columns {
  static constexpr int kPerRow = kCols * static_cast<int>(size_of(kDType)) / 4;
  std::array<std::array<uint32_t, kPerRow>, kRun> rows;

  __device__ Columns(const void* tile, int row, int col) {
    const char* const from = static_cast<const char*>(tile) + in_tile(row, col) * size_of(kDType);
    QUIRE_UNROLL
    for (int r = 0; r < kRun; ++r) {
      const void* const at = from + r * kTile * size_of(kDType);
      if constexpr (kPerRow == 1) rows[r] = {*static_cast<const uint32_t*>(at)};
      if constexpr (kPerRow == 2) {
        const uint2 two = *static_cast<const uint2*>(at);
        rows[r][0] = two.x, rows[r][1] = two.y;
      }
      if constexpr (kPerRow == 4) {
        const uint4 four = *static_cast<const uint4*>(at);
        rows[r][0] = four.x, rows[r][1] = four.y, rows[r][2] = four.z, rows[r][3] = four.w;
      }
    }
  }

  __device__ float value(int row, int col) const { return value_at<kDType>(rows[row], col); }
};

/// A column of a tile after the Hadamard transform, which gives bfloat16.
template <DType kDType, int kCols>
__device__ std::array<uint32_t, kRun / 2> transformed(const Columns<kDType, kCols>& columns, int col, bool signs) {
  float v[kRun];
  QUIRE_UNROLL
  for (int r = 0; r < kRun; ++r) v[r] = columns.value(r, col);
  hadamard16(v, signs);
  std::array<uint32_t, kRun / 2> words;
  QUIRE_UNROLL
  for (int i = 0; i < kRun / 2; ++i) words[i] = pair_of<DType::bf16>(v[2 * i], v[2 * i + 1]);
  return words;
}

/// The columns of a tile that a thread takes: kCols of them, and 16 rows. Lanes that have the same columns and the next
/// 16 rows differ in kRowBit of their numbers first.
/// Where columns lie along memory (kAlong), threads of a warp take neighbouring columns, else neighbouring rows.
template <bool kAlong>
struct ColumnShare;
template <>
struct ColumnShare<false> {
  static constexpr int kCols = 2, kTurns = 2;
  static constexpr unsigned kRowBit = 1;
  int row, col;
  __device__ explicit ColumnShare(int turn) {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    row = lane % 8 * kRun, col = (turn * 32 + warp * 4 + lane / 8) * kCols;
  }
};
template <>
struct ColumnShare<true> {
  static constexpr int kCols = 4, kTurns = 1;
  static constexpr unsigned kRowBit = 16;
  int row, col;
  __device__ explicit ColumnShare(int) {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    row = (warp % 4 * 2 + lane / 16) * kRun, col = (warp / 4 * 16 + lane % 16) * kCols;
  }
};

/// The bits of the largest amax that the threads of a block have, for thread 0; the others get less. All call this, and
/// again only beyond a barrier.
__device__ inline uint32_t largest_of_block(float amax) {
  __shared__ uint32_t of_warp[kTileThreads / 32];
  uint32_t bits = std::bit_cast<uint32_t>(amax);
  const auto take = [&](uint32_t other) { bits = other > bits ? other : bits; };
  QUIRE_UNROLL
  for (unsigned bit = 1; bit < 32; bit *= 2) take(__shfl_xor_sync(~0u, bits, bit));
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = bits;
  __syncthreads();
  if (threadIdx.x == 0)
    for (const uint32_t other : of_warp) take(other);
  return bits;
}

}  // namespace quire::cuda
