// What a warp of skinny.cu computes: one slice of the contraction, of 32 columns.
#pragma once

#include "quire/cuda/kernels/skinny_codes.cuh"

namespace quire::cuda {

/// The sums of a warp: 32 columns by kTiles tiles of rows, of one slice. A lane holds two vectors of each of its
/// columns, which are half a cut each, or a cut of packed codes. When one is multiplied, the one after the other is
/// read into its registers. Sums of cuts before are in shared memory, as far as there are no registers for them.
template <ScaleKind kScale, bool kPacked, int kTiles>
class SkinnySlice {
 public:
  /// Fragments of a lane in shared memory: of the lower 16 columns and of these tiles of the upper ones.
  static constexpr int kUpper = kTiles < 3 ? kTiles : kScale == ScaleKind::e8m0 ? 1 : 2, kSums = kTiles + kUpper;

  /// lines, sums: of this warp. row: the first one, a multiple of a tile's.
  __device__ SkinnySlice(const SkinnyJob& job, const SkinnyProduct& p, const SkinnyLine* lines, float4 (*sums)[kWarp],
                         int row)
      : job_(job),
        p_(p),
        lines_(lines + lane() / 4),
        in_memory_(&sums[0][lane()]),
        tiles_(p.tiles - row / static_cast<int>(kSkinnyRows)),
        numbers_(static_cast<const uint4*>(job.x.numbers) + (p.tile * p.cuts + p.tiles - tiles_) * kCutUnits + lane()),
        of_columns_(kScale == ScaleKind::f32 && p.w.has_block_scales()) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) in_memory_[i * kWarp] = {0, 0, 0, 0};
  }

  /// Sums of columns lane() / 4 + 16 m and the eighth after it, of rows lane() % 4 * 2 + 8 n and the next one: those of
  /// the first column first.
  __device__ float4 fragment(int m, int n) const {
    return is_in_memory(m, n) ? in_memory_[(m * kTiles + n) * kWarp] : in_registers_[n];
  }

  static constexpr bool is_in_memory(int m, int n) { return m == 0 || n < kUpper; }

  /// Adds the cuts of a slice.
  __device__ void run(int slice) {
    Line first[kSkinnyLines], second[kSkinnyLines];
    Ahead ahead{part_of(slice), scale_of(slice)};
    read<0>(first, ahead);
    read<1>(second, ahead);
    const uint4* numbers = numbers_ + int64_t{slice} * p_.tiles * kCutUnits;
    for (int cut = slice; cut < p_.cuts; cut += kPacked ? 2 * kSkinnySlices : kSkinnySlices) {
      multiply<0>(first, numbers);
      if constexpr (kPacked) add(first, cut), numbers += p_.step_of_numbers;
      read<0>(first, ahead);
      if (!kPacked || cut + kSkinnySlices < p_.cuts) {
        multiply<1>(second, numbers);
        add(second, kPacked ? cut + kSkinnySlices : cut);
        numbers += p_.step_of_numbers;
      }
      read<1>(second, ahead);
    }
    if (__any_sync(kAllLanes, (nans_ & 0x80808080u) != 0)) put_nans(slice);
  }

 private:
  using Line = SkinnyVector<kScale, kPacked>;
  /// Where vectors are read next, in bytes of a column.
  struct Ahead {
    unsigned codes, scale;
  };
  __device__ static unsigned part_of(int cut) { return (cut * 4 + lane() % 4) * (kPacked ? 16 : 32); }
  /// Four scales follow each other wherever they are bytes.
  __device__ unsigned scale_of(int cut) const {
    const int part = lane() % 4;
    if constexpr (kScale == ScaleKind::two_level) return (2 * cut + part / 2) * p_.scale_step + part % 2 * 2;
    return cut * p_.scale_step + (kScale == ScaleKind::e8m0 ? part : 0);
  }

  /// The vectors of a cut, or of its half. Behind the end they are those of the beginning: rows are zero there.
  template <int kHalf>
  __device__ void read(Line (&to)[kSkinnyLines], Ahead& ahead) const {
    const unsigned at = ahead.codes + (kPacked ? 0 : kHalf * 16);
    const bool there = at < p_.row_bytes;
    // A scale in float32 is that of a cut, which may have codes where this lane has none.
    const bool has_scale = kScale == ScaleKind::f32 ? ahead.codes - lane() % 4 * 32 < p_.row_bytes : there;
    const unsigned codes = there ? at : 0, scale = has_scale ? ahead.scale : 0;
    if (kPacked || kHalf == 1) {
      ahead.codes += kSkinnySlices * 4 * (kPacked ? 16 : 32);
      ahead.scale += kSkinnySlices * (kScale == ScaleKind::two_level ? 2 : 1) * p_.scale_step;
    }
#pragma unroll
    for (int j = 0; j < kSkinnyLines; ++j) {
      const SkinnyLine& line = lines_[8 * j];
      to[j].codes = __ldg(reinterpret_cast<const uint4*>(line.codes_now() + codes));
      if constexpr (kScale == ScaleKind::e8m0 && (kPacked || kHalf == 0)) to[j].scale = __ldg(line.scale_now() + scale);
      if constexpr (kScale == ScaleKind::two_level)
        to[j].scale = __ldg(reinterpret_cast<const uint16_t*>(line.scale_now() + scale));
      // It multiplies the sum of the cut, whose last vector this is.
      if constexpr (kScale == ScaleKind::f32 && kHalf == 1)
        to[j].scale = __ldg(reinterpret_cast<const uint32_t*>(line.scale_now() + scale));
    }
  }

  /// NaN has been multiplied as a number, which saves time where there is none. The sums of columns that have a NaN in
  /// this slice, found by reading them again, are NaN.
  __device__ void put_nans(int slice) {
#pragma unroll 1
    for (int line = 0; line < kSkinnyLines; ++line) {
      Ahead ahead{part_of(slice), scale_of(slice)};
      uint32_t found = 0;
#pragma unroll 1
      for (; ahead.codes < p_.row_bytes;) {
        Line vectors[kSkinnyLines];
        read<0>(vectors, ahead);
        found |= nan_bits_of(vectors, line);
        if constexpr (kPacked) continue;
        read<1>(vectors, ahead);
        found |= nan_bits_of(vectors, line);
      }
      found &= 0x80808080u;
      found |= __shfl_xor_sync(kAllLanes, found, 1);
      found |= __shfl_xor_sync(kAllLanes, found, 2);
      if (found != 0) put_nan(line);
    }
  }
  static __device__ uint32_t nan_bits_of(const Line (&lines)[kSkinnyLines], int line) {
    uint32_t found = 0;
#pragma unroll
    for (int j = 0; j < kSkinnyLines; ++j) found |= j == line ? lines[j].nan_bits() : 0;
    return found;
  }
  __device__ void put_nan(int line) {
    const float nan = std::bit_cast<float>(0x7FC00000u);
#pragma unroll
    for (int m = 0; m < kSkinnyLines / 2; ++m)
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        if (m != line / 2) continue;
        const float4 sums = fragment(m, n);
        keep(m, n, line % 2 == 0 ? float4{nan, nan, sums.z, sums.w} : float4{sums.x, sums.y, nan, nan});
      }
  }

  /// Half 0 or 1 of a cut, or both of packed codes.
  template <int kHalf>
  __device__ void multiply(const Line (&now)[kSkinnyLines], const uint4* numbers) {
#pragma unroll
    for (int j = 0; j < kSkinnyLines; ++j) {
      nans_ |= now[j].nan_bits();
      if (kHalf == 0 || kPacked) scales_[j] = now[j].scales();
    }
    constexpr int kBegin = kPacked ? 0 : kHalf, kEnd = kPacked ? 2 : kHalf + 1;
#pragma unroll(kTiles > 2 || kScale == ScaleKind::two_level ? 1 : 2)  // registers are few
    for (int half = kBegin; half < kEnd; ++half) multiply_half(now, half, numbers + half * 2 * kWarp);
  }
  __device__ void multiply_half(const Line (&now)[kSkinnyLines], int half, const uint4* numbers) {
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      uint4 of_w[kSkinnyLines];
#pragma unroll
      for (int j = 0; j < kSkinnyLines; ++j) {
        const bool upper = kScale == ScaleKind::two_level && half == 1;
        of_w[j] = now[j].numbers(half, u, __byte_perm(scales_[j], 0, upper ? 0x3232 : 0x1010));
      }
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        if (n > 0 && n >= tiles_) continue;
        const uint4 x = __ldg(&numbers[n * kCutUnits + u * kWarp]);
#pragma unroll
        for (int m = 0; m < kSkinnyLines / 2; ++m) {
          const uint4 &upper = of_w[2 * m], &lower = of_w[2 * m + 1];
          multiply_add(sum_[m][n], {upper.x, lower.x, upper.y, lower.y}, x.x, x.y);
          multiply_add(sum_[m][n], {upper.z, lower.z, upper.w, lower.w}, x.z, x.w);
        }
      }
    }
  }

  /// A cut to those before it, under what float32 scales of x and w multiply it by.
  __device__ void add(const Line (&last)[kSkinnyLines], int cut) {
    if (job_.x.cut_scales || of_columns_) scale_cut(last, cut);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      if (n > 0 && n >= tiles_) continue;
#pragma unroll
      for (int m = 0; m < kSkinnyLines / 2; ++m) {
        float (&one)[4] = sum_[m][n];
        const float4 all = fragment(m, n);
        keep(m, n, {all.x + one[0], all.y + one[1], all.z + one[2], all.w + one[3]});
#pragma unroll
        for (int e = 0; e < 4; ++e) one[e] = 0;
      }
    }
  }
  __device__ void scale_cut(const Line (&last)[kSkinnyLines], int cut) {
    const int64_t first = p_.tile * p_.cuts + int64_t{cut} * p_.tiles + p_.tiles - tiles_;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      if (n > 0 && n >= tiles_) continue;
      float2 of_rows{1, 1};
      if (job_.x.cut_scales)
        of_rows = *reinterpret_cast<const float2*>(&job_.x.cut_scales[(first + n) * kSkinnyRows + lane() % 4 * 2]);
#pragma unroll
      for (int m = 0; m < kSkinnyLines / 2; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          sum_[m][n][e] *= e % 2 ? of_rows.y : of_rows.x;
          if (kScale == ScaleKind::f32)
            sum_[m][n][e] *= of_columns_ ? std::bit_cast<float>(last[2 * m + e / 2].scale) : 1.0f;
        }
    }
  }

  __device__ void keep(int m, int n, const float4& sums) {
    if (is_in_memory(m, n))
      in_memory_[(m * kTiles + n) * kWarp] = sums;
    else
      in_registers_[n] = sums;
  }

  const SkinnyJob& job_;
  const SkinnyProduct& p_;
  const SkinnyLine* const lines_;
  float4* const in_memory_;
  const int tiles_;  ///< the last of rows from this one on
  const uint4* const numbers_;
  const bool of_columns_;
  uint32_t scales_[kSkinnyLines], nans_ = 0;
  float sum_[kSkinnyLines / 2][kTiles][4] = {};
  float4 in_registers_[kTiles] = {};
};

}  // namespace quire::cuda
