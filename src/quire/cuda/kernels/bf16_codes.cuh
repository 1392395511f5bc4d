// Codes as bfloat16 in shared memory, for tensor cores. Every element format is exact in bfloat16, and so is a code
// times the power of two of an E8M0 scale (as long as the value is one of bfloat16), and an E2M1 code times an E4M3
// scale.
#pragma once

#include <algorithm>

#include "quire/cuda/kernels/codes.cuh"
#include "quire/cuda/kernels/tensor.cuh"
#include "quire/spec/kinds.h"

namespace quire::cuda {

static_assert(std::ranges::all_of(kByteElements, [](Format f) { return row(f).bits() == 8; }),
              "a sign is the upper bit of a byte here");
static_assert(std::ranges::all_of(kElements, [](Format f) { return row(f).man_bits <= 7 && row(f).bias < 127; }),
              "elements are numbers of bfloat16");

/// Codes of a line that a thread decodes at a time: 16 bytes as bfloat16, a row of a matrix of 8 x 8. They lie there in
/// the order 0, 4, 1, 5, 2, 6, 3, 7, which is cheap to make of both kinds of codes. Sums do not mind: both operands
/// have it.
inline constexpr int kUnit = 8;

/// Codes and the byte of their scale, as memory has them.
struct RawUnit {
  uint32_t low, high;  ///< packed: low alone
  uint32_t scale;
};

/// What makes bfloat16 of codes.
class Bf16Decoder {
 public:
  /// `scaled`: by the bytes of their blocks' scales.
  __device__ Bf16Decoder(const QuantSpec& spec, bool scaled)
      : kind_(spec.row().scale),
        packed_(spec.packed()),
        scaled_(scaled),
        infinite_(row(spec.element).specials == Specials::ieee ? static_cast<uint8_t>(row(spec.element).max_code() + 1)
                                                               : uint8_t{0xFF}),
        shift_(packed_ ? 5 + row(spec.element).man_bits : 1 + row(spec.element).man_bits),
        unit_(static_cast<uint32_t>(254 - row(spec.element).bias) * 0x00800080u),
        above_(static_cast<uint32_t>(row(spec.element).magnitudes() - 1 - row(spec.element).max_code()) * 0x01010101u) {
  }

  __device__ uint4 operator()(const RawUnit& raw) const { return packed_ ? of<true>(raw) : of<false>(raw); }
  /// The same where it is known whether codes are packed.
  template <bool kPacked>
  __device__ uint4 of(const RawUnit& raw) const {
    uint32_t pairs[4];
    if constexpr (kPacked) {
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[i] = numbers(raw.low << (12 - 4 * i), 0x70007000u);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[i] = numbers(__byte_perm(raw.low, raw.high, 0x4000 + 0x1010 * i), 0x7F007F00u);
      const uint32_t low = (raw.low & 0x7F7F7F7Fu) + above_, high = (raw.high & 0x7F7F7F7Fu) + above_;
      if ((low | high) & 0x80808080u) {
#pragma unroll
        for (int i = 0; i < 4; ++i) replace_specials(pairs[i], raw.low >> 8 * i, raw.high >> 8 * i);
      }
    }
    if (scaled_) {
      const uint32_t scale = scale_bits(raw.scale) * 0x00010001u;
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[i] = times(pairs[i], scale);
    }
    return {pairs[0], pairs[1], pairs[2], pairs[3]};
  }

  /// The byte of a scale, in the bits of bfloat16.
  __device__ uint32_t scale_bits(uint32_t byte) const {
    return upper(kind_ == ScaleKind::e8m0 ? e8m0_value(static_cast<uint8_t>(byte)) : Decoder(kBlockScaleFormat)(byte));
  }

 private:
  /// Of a code in the upper bits of each half: its sign is in place, and its magnitude becomes that of a small number.
  __device__ uint32_t numbers(uint32_t codes, uint32_t magnitudes) const {
    return times((codes & 0x80008000u) | (codes & magnitudes) >> shift_, unit_);
  }
  /// Where codes are infinite or NaN.
  __device__ void replace_specials(uint32_t& pair, uint32_t low, uint32_t high) const {
    const auto special = [&](uint32_t code, uint32_t bits) -> uint32_t {
      const uint32_t magnitude = code & 0x7Fu;
      if (magnitude + (above_ & 0xFFu) < 0x80u) return bits;
      return (code & 0x80u) << 8 | (magnitude == infinite_ ? 0x7F80u : 0x7FC0u);
    };
    pair = special(low, pair & 0xFFFFu) | special(high, pair >> 16) << 16;
  }
  /// Of a number of bfloat16, as float32.
  static __device__ uint32_t upper(float x) { return std::bit_cast<uint32_t>(x) >> 16; }

  ScaleKind kind_;
  bool packed_, scaled_;
  uint8_t infinite_;  ///< the code, or none
  int shift_;
  uint32_t unit_;   ///< that of the format in the bits of bfloat16, twice
  uint32_t above_;  ///< makes magnitudes above the largest finite one 128 or more, four times
};

/// How the codes of an operand and the scales of its blocks follow each other. In shared memory, where it takes no
/// registers.
struct UnitLayout {
  int64_t contraction, word_step, byte_step;  ///< as CodeLine has them
  int64_t scale_step, scale_step_4;           ///< from a block to the next one, and to the fourth one after it
  uint8_t block_shift;                        ///< log2 of a block. As long as a bool: no byte between is unwritten
  bool packed, scaled;
  bool along;  ///< words of a line follow each other; else lanes take neighbouring lines
  Bf16Decoder decoder;

  /// `fold`: scales of blocks are multiplied into the codes.
  __device__ UnitLayout(const OperandValues& v, bool fold)
      : contraction(v.contraction),
        scale_step(step_of_scales(v, 1)),
        scale_step_4(step_of_scales(v, 4)),
        block_shift(static_cast<uint8_t>(__ffsll(v.block) - 1)),
        packed(v.from.spec.packed()),
        scaled(fold),
        decoder(v.from.spec, fold) {
    const CodeLine line(v, 0);
    word_step = line.word_step(), byte_step = line.byte_step();
    along = word_step == 4 && byte_step == 1;
  }

 private:
  static __device__ int64_t step_of_scales(const OperandValues& v, int64_t blocks) {
    const SideGrid grid{v.from.spec, v.from.direction, v.from.outer, v.blocks};
    return scale_index(grid, 0, blocks) - scale_index(grid, 0, 0);
  }
};

/// Codes of kLines lines of an operand, of which a block of 2 kLines threads reads 4 kUnit of each line at a step.
template <int kLines>
class UnitReader {
 public:
  static constexpr int kEach = 2;  ///< units of a thread at a step
  static constexpr int kDepth = 4 * kUnit;

  __device__ UnitReader(const OperandValues& v, const UnitLayout& layout, int64_t first_line) : layout_(layout) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int64_t l = first_line + line(i);
      const int words = chunk(i) * (layout.packed ? 1 : 2);
      at_[i] = l < v.from.outer ? CodeLine(v, l).begin() + words * layout.word_step : nullptr;
      if (layout.scaled)
        scale_[i] = static_cast<const uint8_t*>(v.from.scale) +
                    scale_index({v.from.spec, v.from.direction, v.from.outer, v.blocks}, l, 0);
    }
  }

  /// Of this thread's unit i.
  __device__ int line(int i) const {
    const int thread = threadIdx.x;
    return layout_.along ? thread / 4 + i * (kLines / 2) : thread % kLines;
  }
  __device__ int chunk(int i) const {
    const int thread = threadIdx.x;
    return layout_.along ? thread % 4 : thread / kLines + 2 * i;
  }

  /// Of each step in turn.
  __device__ void read(RawUnit (&to)[kEach], int step) {
    const int64_t begin = int64_t{step} * kDepth, left = layout_.contraction - begin;
    const int64_t advance = (layout_.packed ? kDepth / 8 : kDepth / 4) * layout_.word_step;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      to[i] = {0, 0, 0};
      if (at_[i] && chunk(i) * kUnit < left) {
        if (layout_.scaled) to[i].scale = scale_[i][scale_offset(begin + chunk(i) * kUnit)];
        read_unit(to[i], at_[i], left - chunk(i) * kUnit);
        at_[i] += advance;
      }
    }
  }

 private:
  __device__ int64_t scale_offset(int64_t l) const {
    const int64_t block = l >> layout_.block_shift;
    return (block >> 2) * layout_.scale_step_4 + (block & 3) * layout_.scale_step;
  }
  /// `left`: codes of the line from here on.
  __device__ void read_unit(RawUnit& raw, const uint8_t* from, int64_t left) const {
    const bool packed = layout_.packed;
    const auto address = reinterpret_cast<uintptr_t>(from);
    if (left < kUnit) {
      read_last(raw, from, static_cast<int>(left));
    } else if (layout_.along && !packed && address % 8 == 0) {
      const uint2 both = *reinterpret_cast<const uint2*>(from);
      raw.low = both.x, raw.high = both.y;
    } else if (layout_.byte_step == 1 && address % 4 == 0) {
      raw.low = word(from);
      if (!packed) raw.high = word(from + layout_.word_step);
    } else {
      raw.low = bytes(from);
      if (!packed) raw.high = bytes(from + layout_.word_step);
    }
  }
  static __device__ uint32_t word(const uint8_t* from) { return *reinterpret_cast<const uint32_t*>(from); }
  __device__ uint32_t bytes(const uint8_t* from) const {
    const int64_t step = layout_.byte_step;
    return uint32_t{from[0]} | uint32_t{from[step]} << 8 | uint32_t{from[2 * step]} << 16 |
           uint32_t{from[3 * step]} << 24;
  }
  /// Fewer codes than a unit has, at the end of a line.
  __device__ void read_last(RawUnit& raw, const uint8_t* from, int codes) const {
    const int in_byte = layout_.packed ? 2 : 1;
#pragma unroll 1
    for (int k = 0; k < codes; k += in_byte) {
      const int byte = k / in_byte;
      uint32_t found = from[byte / 4 * layout_.word_step + byte % 4 * layout_.byte_step];
      if (k + in_byte > codes) found &= 0xF;
      (byte < 4 ? raw.low : raw.high) |= found << 8 * (byte % 4);
    }
  }

  const UnitLayout& layout_;
  const uint8_t* at_[kEach];  ///< null: there is no such line
  const uint8_t* scale_[kEach] = {};
};

}  // namespace quire::cuda
