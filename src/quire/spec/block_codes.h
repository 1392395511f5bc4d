// What is stored of a block, and what that stands for: the reference of every device is this code. `Lines` as in
// block_scale.h.
#pragma once

#include <array>
#include <cstdint>

#include "quire/format/codec.h"
#include "quire/spec/block_scale.h"
#include "quire/spec/problem.h"
#include "quire/spec/random.h"
#include "quire/spec/scale_index.h"

namespace quire {

/// Writes the scale of a block of a line to its place in the scale buffer.
template <class Lines>
QUIRE_HOST_DEVICE void write_scale(const Lines& t, std::array<int64_t, 2> line_and_block, const BlockScale& s,
                                   void* buffer) {
  const int64_t i = scale_index({t.spec, t.direction, t.outer, t.blocks}, line_and_block[0], line_and_block[1]);
  if (has_byte_scales(t.spec))
    static_cast<uint8_t*>(buffer)[i] = s.byte;
  else
    static_cast<float*>(buffer)[i] = s.stored;
}

/// The random numbers of values [position, position + 16) of a line, if the spec needs any; `r` as Randomness::read()
/// gives it (numerics.md 0.11).
template <class Lines>
constexpr std::array<uint32_t, 4> random_words(const Lines& t, const Randomness& r, int64_t line, int64_t position) {
  if (!t.spec.stochastic) return {};
  const uint64_t offset = t.direction == Direction::rowwise ? r.rowwise_offset : r.columnwise_offset;
  const int64_t number = r.number(t.direction, {t.outer, t.blocks}, line, position / t.block);
  return philox(r.seed, offset, static_cast<uint64_t>(number));
}

/// Encodes values [position, position + 16) of a line, as many as exist. Packed codes are written in pairs, whose last
/// odd half is 0.
template <class Lines>
QUIRE_HOST_DEVICE void write_codes(const Lines& t, std::array<int64_t, 2> line_and_position, float multiplier,
                                   const Randomness& r, uint8_t* data) {
  const auto [line, position] = line_and_position;
  const SideGrid codes{t.spec, t.direction, t.outer, t.contraction};
  const std::array<uint32_t, 4> words = random_words(t, r, line, position);
  float v[kValueGroup];
  t.read(v, line, position);
  unsigned even = 0;
  for (int i = 0; i < kValueGroup && position + i < t.contraction; ++i) {
    const float x = v[i] * multiplier;
    const int rounded = t.spec.stochastic ? encode_stochastic(x, random_byte(words, i)) : encode(t.spec.element, x);
    const auto code = static_cast<unsigned>(rounded);
    const int64_t at = data_index(codes, line, position + i);
    if (!t.spec.packed()) {
      data[at] = static_cast<uint8_t>(code);
    } else if (i % 2 == 0) {
      even = code;
      if (position + i + 1 == t.contraction) data[at / 2] = pack(even, 0);
    } else {
      data[at / 2] = pack(even, code);
    }
  }
}

/// The value of code (line, position), in float32 (numerics.md 3.4, 4.6, 5.1).
QUIRE_HOST_DEVICE inline float value_of(const DequantizeProblem& p, int64_t line, int64_t position) {
  const int64_t outer = p.out.rows, contraction = p.out.cols;
  const int64_t block = block_length(p.spec, contraction), blocks = block_count(p.spec, contraction);
  const int64_t at = data_index({p.spec, p.direction, outer, contraction}, line, position);
  const auto code = static_cast<int>(code_at(p.spec, static_cast<const uint8_t*>(p.data), at));
  const float value = decode(p.spec.element, code);
  const int64_t i = scale_index({p.spec, p.direction, outer, blocks}, line, position / block);
  const ScaleKind kind = p.spec.row().scale;
  if (kind == ScaleKind::f32) return value * static_cast<const float*>(p.scale)[i];
  const uint8_t byte = static_cast<const uint8_t*>(p.scale)[i];
  if (kind == ScaleKind::e8m0) return value * e8m0_value(byte);
  return value * nvfp4_value(decode(kBlockScaleFormat, byte), p.amax[amax_index(p.spec, line)], p.spec);
}

}  // namespace quire
