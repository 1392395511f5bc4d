// One product of skinny.cu in shared memory, and the vectors of codes that its lanes read and decode.
#pragma once

#include "quire/cuda/kernels/codes.cuh"
#include "quire/cuda/kernels/skinny.h"
#include "quire/cuda/kernels/tensor.cuh"

namespace quire::cuda {

inline constexpr int kSkinnyLines = kSkinnyColumns / 8;  ///< columns of a lane: every eighth one
inline constexpr int kCutUnits = kSkinnyUnits * kWarp;   ///< of 16 bytes of a tile of rows, in a cut

/// What divides numbers under E4M3 scales, and is taken back at the end: one multiplication then makes both a
/// number of a code and its product with a scale, within bfloat16.
inline constexpr int kSkinnyFold = 8;  ///< log2
inline constexpr float kSkinnyUnfold = 1 << kSkinnyFold;

/// Where the codes and the scales of a column begin.
struct SkinnyLine {
  const uint8_t *codes, *scale;

  /// Read when they are asked for, because a lane has no registers for them.
  __device__ const uint8_t* codes_now() const { return *const_cast<const uint8_t* const volatile*>(&codes); }
  __device__ const uint8_t* scale_now() const { return *const_cast<const uint8_t* const volatile*>(&scale); }
};

/// One product, in shared memory, where its many numbers take no registers.
struct SkinnyProduct {
  OperandValues w;
  ProductOutput to;
  int64_t group, tile, begin;  ///< where it is in x
  int rows, tiles;             ///< of the group
  int cuts;
  unsigned columns, row_bytes, scale_step;
  int64_t step_of_numbers;  ///< from a cut of rows to the next one of its slice

  __device__ SkinnyProduct(const SkinnyJob& job, int64_t e, const GroupPlace& place)
      : w(operand_of(job.w, e, job.w.groups[e])),
        to(output_of(job.out, e, place, place.rows)),
        group(e),
        tile(skinny_tile_of(e, place.begin)),
        begin(place.begin),
        rows(static_cast<int>(place.rows)),
        tiles(static_cast<int>(ceil_div(place.rows, kSkinnyRows))),
        cuts(static_cast<int>(ceil_div(w.contraction, kLongestCut))),
        columns(static_cast<unsigned>(to.out.cols)),
        row_bytes(static_cast<unsigned>(w.from.spec.packed() ? w.contraction / 2 : w.contraction)),
        scale_step(step_of_scales()),
        step_of_numbers(int64_t{kSkinnySlices} * tiles * kCutUnits) {}

  /// Columns that are not there are computed like the last one, and not stored.
  __device__ SkinnyLine line(int64_t column) const {
    const int64_t last = w.from.outer - 1, mine = column < last ? column : last;
    return {static_cast<const uint8_t*>(w.from.data) + mine * int64_t{row_bytes},
            static_cast<const uint8_t*>(w.from.scale) + scale_width() * scale_index(scales(), mine, 0)};
  }

 private:
  __device__ int scale_width() const { return has_byte_scales(w.from.spec) ? 1 : 4; }
  __device__ SideGrid scales() const { return {w.from.spec, w.from.direction, w.from.outer, w.blocks}; }
  /// Bytes from a column's scale to the fourth one after it, or to the next one of those in float32.
  __device__ unsigned step_of_scales() const {
    if (!w.has_block_scales()) return 0;
    const int64_t blocks = has_byte_scales(w.from.spec) ? 4 : 1;
    return static_cast<unsigned>(scale_width() * (scale_index(scales(), 0, blocks) - scale_index(scales(), 0, 0)));
  }
};

/// kSums: fragments of four outputs that each lane has in it.
template <int kColumns, int kSums>
struct SkinnyMemory {
  __device__ const SkinnyProduct& product() const { return reinterpret_cast<const SkinnyProduct&>(product_); }
  /// By all threads of a block, none of which reads the one before any more.
  __device__ void hold(const SkinnyJob& job, int64_t e, const GroupPlace& place) {
    if (threadIdx.x == 0) reinterpret_cast<SkinnyProduct&>(product_) = SkinnyProduct(job, e, place);
    __syncthreads();
  }
  /// By all threads of a block. `again`: after lines and sums that other threads may still read.
  __device__ void begin_at(unsigned of_block, int of_row, bool again) {
    if (again) __syncthreads();
    if (threadIdx.x == 0) block = of_block, row = of_row;
    if (threadIdx.x < kColumns) lines[threadIdx.x] = product().line(int64_t{of_block} * kColumns + threadIdx.x);
    __syncthreads();
  }

  unsigned block;  ///< of columns, and the first row: what a loop needs after it, for which there are no registers
  int row;
  SkinnyLine lines[kColumns];
  float4 sums[kSkinnyThreads / kWarp][kSums][kWarp];  ///< of warps

 private:
  alignas(SkinnyProduct) unsigned char product_[sizeof(SkinnyProduct)];
};

/// Of two codes in the upper bits of each half: their signs are in place, and the bits of a magnitude become those of a
/// small number of bfloat16, exactly.
template <bool kPacked, int kBits>
__device__ uint32_t small_pair(uint32_t codes) {
  return (codes & 0x80008000u) | (codes & (kPacked ? 0x70007000u : 0x7F007F00u)) >> ((kPacked ? 5 : 1) + kBits);
}

/// A lane's vector of a column, and the scale that comes with it.
template <ScaleKind kScale, bool kPacked>
struct SkinnyVector {
  uint4 codes;
  uint32_t scale;  ///< as stored: a byte, or those of both halves, or float32

  /// What multiplies the codes of each half: two numbers of bfloat16, of which E8M0 and half 0 alone have the first.
  __device__ uint32_t scales() const {
    if constexpr (kScale == ScaleKind::e8m0)
      return std::bit_cast<uint32_t>(e8m0_value(static_cast<uint8_t>(scale))) >> 16;
    // Times the unit of packed codes, which is 2^126: its product with a large scale would be too large.
    constexpr uint32_t unit = (254 - row(kBlockScaleFormat).bias) * 0x00800080u,
                       fold = (126 - kSkinnyFold + 127) * 0x00800080u;
    const uint32_t small = small_pair<false, row(kBlockScaleFormat).man_bits>(__byte_perm(scale, 0, 0x1404));
    return kScale == ScaleKind::two_level ? times(times(small, unit), fold) : 0;
  }
  /// Those of unit 0 or 1 of a half, under that.
  __device__ uint4 numbers(int half, int u, uint32_t scale_pair) const {
    const uint4 small = small_numbers(half, u);
    const auto of = [&](uint32_t pair) {
      if constexpr (kScale == ScaleKind::two_level) return times(pair, scale_pair);
      const uint32_t number = times(pair, kUnitPair);
      return kScale == ScaleKind::f32 ? number : times(number, scale_pair);
    };
    return {of(small.x), of(small.y), of(small.z), of(small.w)};
  }
  /// Has the upper bit of some byte where a code, or the scale of packed codes, is NaN in E4M3.
  __device__ uint32_t nan_bits() const {
    const auto of = [](uint32_t word) { return (word & 0x7F7F7F7Fu) + 0x01010101u; };
    if constexpr (kScale == ScaleKind::two_level) return of(scale);
    return kPacked ? 0 : of(codes.x) | of(codes.y) | of(codes.z) | of(codes.w);
  }

 private:
  static constexpr Format kFormat = kPacked ? kPackedFormat : Format::e4m3;
  /// Of bfloat16, twice: what small_numbers() are too small by.
  static constexpr uint32_t kUnitPair = static_cast<uint32_t>(254 - row(kFormat).bias) * 0x00800080u;

  /// Pairs in the order of Bf16Decoder.
  __device__ uint4 small_numbers(int half, int u) const {
    const auto of = small_pair<kPacked, row(kFormat).man_bits>;
    if constexpr (kPacked) {
      const uint32_t word = half == 0 ? (u == 0 ? codes.x : codes.y) : u == 0 ? codes.z : codes.w;
      return {of(word << 12), of(word << 8), of(word << 4), of(word)};
    }
    const uint32_t low = u == 0 ? codes.x : codes.z, high = u == 0 ? codes.y : codes.w;
    return {of(__byte_perm(low, high, 0x4000)), of(__byte_perm(low, high, 0x5010)), of(__byte_perm(low, high, 0x6020)),
            of(__byte_perm(low, high, 0x7030))};
  }
};
static_assert(row(kPackedFormat).bias == 1, "the unit of packed codes is 2^126");
static_assert(row(Format::e4m3).max_code() == 0x7E, "a NaN is all ones");

}  // namespace quire::cuda
