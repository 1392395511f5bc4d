// Tiles of a matrix, read 16 values a thread and kept in shared memory; values stay in words as they were read, two of
// 16 bits together.
#pragma once

#include "quire/cuda/kernels/groups.cuh"
#include "quire/cuda/kernels/pairs.cuh"
#include "quire/cuda/kernels/tiles.h"
#include "quire/spec/hadamard.h"
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

/// The largest magnitudes of as many series of values as a word has: NaN is left out, or is the largest (kNan).
template <DType kDType, bool kNan = false>
struct Largest {
  static constexpr uint32_t kMagnitudes = kDType == DType::f32 ? 0x7FFFFFFFu : 0x7FFF7FFFu;

  uint32_t bits = 0;

  __device__ void add(uint32_t word) { take(word & kMagnitudes); }
  /// Takes what the lanes have that differ in one bit of their numbers; every lane of the warp calls this.
  __device__ void join(unsigned bit) { take(__shfl_xor_sync(~0u, bits, bit)); }
  /// Of all series, which are one then.
  __device__ void merge() {
    if constexpr (kDType != DType::f32) take(bits >> 16);
  }

  __device__ float of(int series) const { return value_at<kDType>(std::array{bits}, series); }
  __device__ bool has_nan() const { return of(0) != of(0) || (kDType != DType::f32 && of(1) != of(1)); }

 private:
  __device__ void take(uint32_t magnitudes) {
    bits = kNan ? larger_or_nan<kDType>(bits, magnitudes) : larger<kDType>(bits, magnitudes);
  }
};

/// What scales of blocks follow from: amaxes, and the largest magnitudes with NaN.
template <DType kDType>
struct Seen {
  Largest<kDType> most;
  Largest<kDType, true> all;

  /// through(largest) gives what there is to a Largest of either kind. Few tensors have NaN: only where there is one,
  /// is all looked at again without it. Every lane of the warp calls this.
  template <class Through>
  __device__ explicit Seen(Through&& through) {
    through(all);
    most.bits = all.bits;
    if (__any_sync(~0u, all.has_nan())) {
      most.bits = 0;
      through(most);
    }
  }
};

/// Runs of a column of runs of a matrix, a number of rows apart.
template <DType kDType>
class RunReader {
  using Raw = std::conditional_t<kDType == DType::f32, uint32_t, uint16_t>;

 public:
  using Words = std::array<uint32_t, kWords<kDType>>;

  /// From element `at` of the matrix on, of which `valid` are of its row.
  __device__ RunReader(const Matrix& x, int64_t at, int64_t valid, int rows)
      : from_(static_cast<const Raw*>(x.data) + at),
        step_(rows * x.row_stride),
        valid_(static_cast<int>(valid < kRun ? valid : kRun)),
        whole_(valid >= kRun && (reinterpret_cast<uintptr_t>(from_) | step_ * sizeof(Raw)) % sizeof(uint4) == 0) {}

  /// The next run; from `valid` on it is zeros, and all of it where the matrix has no such row.
  __device__ Words next(bool exists) {
    const Raw* const from = from_;
    from_ += step_;
    Words words{};
    if (exists && whole_) {
      QUIRE_UNROLL
      for (int i = 0; i < kWords<kDType> / 4; ++i) {
        const uint4 four = reinterpret_cast<const uint4*>(from)[i];
        words[4 * i] = four.x, words[4 * i + 1] = four.y, words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
      }
      return words;
    }
    constexpr int per_word = kRun / kWords<kDType>;
    const int valid = exists ? valid_ : 0;
    QUIRE_UNROLL
    for (int i = 0; i < kRun; ++i)
      if (i < valid) words[i / per_word] |= static_cast<uint32_t>(from[i]) << i % per_word * 16;
    return words;
  }

 private:
  const Raw* from_;
  int64_t step_;
  int valid_;
  bool whole_;
};

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

/// The runs of rows of a tile that this thread has: those of one column of runs, each so many rows after the last.
inline constexpr int kRowStep = static_cast<int>(kTileThreads) / kRowLanes;
__device__ inline int first_row() { return static_cast<int>(threadIdx.x) / kRowLanes; }
__device__ inline int run_col() { return static_cast<int>(threadIdx.x) % kRowLanes * kRun; }

/// A reader of them, and how many rows of the tile there are.
template <DType kDType>
struct TileReader {
  RunReader<kDType> runs;
  int rows;

  __device__ TileReader(const Matrix& x, const TilePlace& place)
      : runs(x, (place.row + first_row()) * x.row_stride + place.col + run_col(), x.cols - place.col - run_col(),
             kRowStep),
        rows(static_cast<int>(x.rows - place.row < kTile ? x.rows - place.row : kTile)) {}
  __device__ typename RunReader<kDType>::Words at(int row) { return runs.next(row < rows); }
};

/// Calls each(row, col, words) for them. Every lane of a warp is called as often, and kRowLanes consecutive lanes have
/// a whole row.
template <DType kDType, class Each>
__device__ void each_run(const Matrix& x, const TilePlace& place, Each&& each) {
  TileReader<kDType> reader(x, place);
#pragma unroll 1
  for (int row = first_row(); row < kTile; row += kRowStep) each(row, run_col(), reader.at(row));
}

/// The same where there is much to do with a run: the next one is read in the meantime.
template <DType kDType, class Each>
__device__ void each_run_ahead(const Matrix& x, const TilePlace& place, Each&& each) {
  TileReader<kDType> reader(x, place);
  auto next = reader.at(first_row());
#pragma unroll 1
  for (int row = first_row(); row < kTile; row += kRowStep) {
    const auto words = next;
    next = reader.at(row + kRowStep);
    each(row, run_col(), words);
  }
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

/// hadamard16() of numbers of 16 bits: a quarter of one is exact, so additions take it from a multiplication that is
/// not rounded. Nothing is -0 from the first one on, because +0 is added to it.
__device__ inline void hadamard16_of_halves(float (&v)[kRun], bool signs) {
  static_assert(kHadamardSize == kRun);
  const auto quarter = [&](int i) { return signs && (kHadamardSigns >> i & 1u) ? -0.25f : 0.25f; };
  QUIRE_UNROLL
  for (int i = 0; i < kRun; i += 2) {
    const float a = __fmaf_rn(v[i], quarter(i), 0.0f), b = v[i + 1];
    v[i] = __fmaf_rn(b, quarter(i + 1), a), v[i + 1] = __fmaf_rn(b, -quarter(i + 1), a);
  }
  QUIRE_UNROLL
  for (int stride = 2; stride < kRun; stride *= 2) {
    QUIRE_UNROLL
    for (int i = 0; i < kRun; ++i) {
      if (i & stride) continue;
      const float a = v[i], b = v[i + stride];
      v[i] = a + b, v[i + stride] = a - b;
    }
  }
}

/// A column of a tile after the Hadamard transform, which gives bfloat16.
template <DType kDType, int kCols>
__device__ std::array<uint32_t, kRun / 2> transformed(const Columns<kDType, kCols>& columns, int col, bool signs) {
  float v[kRun];
  QUIRE_UNROLL
  for (int r = 0; r < kRun; ++r) v[r] = columns.value(r, col);
  if constexpr (kDType == DType::f32)
    hadamard16(v, signs);
  else
    hadamard16_of_halves(v, signs);
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
