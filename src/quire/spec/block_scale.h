// The scale of a block: the rules of scale.h applied to its values. The reference of every device is this code. `Lines`
// is ValueLines, or any type with its members that are used here: spec, x.dtype, outer, contraction, block and read.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <limits>

#include "quire/base/dtype.h"
#include "quire/format/codec.h"
#include "quire/spec/buffers.h"
#include "quire/spec/scale.h"
#include "quire/spec/value_lines.h"

namespace quire {

/// Lines [line, line + lines), positions [begin, end). It may reach beyond what exists.
struct ValueTile {
  int64_t line, lines, begin, end;
};

/// The values that share the scale of a block of a line.
template <class Lines>
QUIRE_HOST_DEVICE ValueTile sharing(const Lines& t, int64_t line, int64_t block) {
  const int64_t begin = block * t.block, end = begin + t.block;
  if (t.spec.row().scope == Scope::tensor) return {0, t.outer, begin, end};
  if (!t.spec.square) return {line, 1, begin, end};
  return {line / t.block * t.block, t.block, begin, end};
}

/// What scales follow from.
struct Measured {
  float amax = 0;      ///< max |x|. NaN fails the comparison, so it never counts (numerics.md 0.8)
  bool finite = true;  ///< whether all values are: neither NaN nor Inf

  constexpr void add(float x) {
    const float magnitude = std::bit_cast<float>(std::bit_cast<uint32_t>(x) & 0x7FFFFFFFu);
    if (magnitude > amax) amax = magnitude;
    finite &= is_finite(x);
  }
};

template <class Lines>
QUIRE_HOST_DEVICE Measured measure(const Lines& t, const ValueTile& tile) {
  Measured found;
  for (int64_t o = tile.line; o < tile.line + tile.lines && o < t.outer; ++o)
    for (int64_t l = tile.begin; l < tile.end && l < t.contraction; l += kValueGroup) {
      float v[kValueGroup];
      t.read(v, o, l);
      QUIRE_UNROLL
      for (const float x : v) found.add(x);
    }
  return found;
}

/// What a block's elements are multiplied by, and what is stored: a float32 or a byte.
struct BlockScale {
  float multiplier = 1;
  float stored = 1;
  uint8_t byte = 0;
};

/// What a scale follows from beside the values of its block.
struct AboveBlock {
  const float* given = nullptr;  ///< QuantizeProblem::scale
  float number = 0;              ///< number_above() of the tensor or the line
};

/// What blocks follow from, and the amax buffer stores, for an amax above them. given: QuantizeProblem::scale.
constexpr float number_above(const QuantSpec& spec, float amax, const float* given) {
  return spec.given && spec.row().scale == ScaleKind::two_level ? *given : stored_global(amax, spec);
}

/// A float32 scale of an amax: of a block, or of what is above it.
template <class Lines>
QUIRE_HOST_DEVICE BlockScale f32_scale(const Lines& t, float amax, const float* given) {
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinite = t.spec.row().scope == Scope::block ? largest_finite(t.x.dtype) : kFloatMax;
  const bool lost = t.spec.nan && !is_finite(amax);  // also where a scale is given
  if (t.spec.given) return {1.0f / *given, lost ? nan : *given, 0};
  const float s = given ? *given : scale_from_amax(amax, t.spec, infinite);
  return {s, lost ? nan : 1.0f / s, 0};
}

/// The nearest two-level scale to a target, under what is above it.
constexpr BlockScale two_level_scale(float target, const GlobalScale& g) {
  const uint8_t byte = static_cast<uint8_t>(encode(kBlockScaleFormat, target));
  return {nvfp4_multiplier(decode(kBlockScaleFormat, byte), g), 1, byte};
}

/// The two scales of a block that 4over6 compares (numerics.md 5.8): under them its largest codes are 4 and 6.
constexpr std::array<BlockScale, 2> four_over_six_scales(float amax, const GlobalScale& g) {
  const auto at_most_448 = [](float x) { return 448.0f < x ? 448.0f : x; };
  const float base = amax / 6.0f * g.encode;
  return {two_level_scale(at_most_448(base * 1.5f), g), two_level_scale(at_most_448(base), g)};
}

/// The error of one value under a scale and the stored g (numerics.md 5.8, 5.11).
struct ValueError {
  bool of_amax, squared;
  float scale, stored, most, value;

  constexpr ValueError(const QuantSpec& spec, const BlockScale& s, float g)
      : of_amax(spec.global == Global::amax),
        squared(spec.four_over_six == FourOverSix::mse),
        scale(decode(kBlockScaleFormat, s.byte)),
        stored(g),
        most(6.0f * spec.block_scale_max()),
        value(nvfp4_value(scale, g, spec)) {}

  /// code: the decoded code of x.
  constexpr float of(float x, float code) const {
    const float d = (of_amax ? code * scale * stored / most : code * value) - x;
    return squared ? d * d : d < 0 ? -d : d;
  }
};

/// The error of a line's block, summed in order.
template <class Lines>
QUIRE_HOST_DEVICE float line_error(const Lines& t, int64_t line, int64_t begin, const BlockScale& s, float g) {
  const ValueError error(t.spec, s, g);
  float v[kValueGroup], sum = 0;
  t.read(v, line, begin);
  for (const float x : v) sum += error.of(x, decode(t.spec.element, encode(t.spec.element, x * s.multiplier)));
  return sum;
}

/// The error of a block, or of a tile: its lines summed by a tree.
template <class Lines>
QUIRE_HOST_DEVICE float block_error(const Lines& t, const ValueTile& tile, const BlockScale& s, float g) {
  if (!t.spec.square) return line_error(t, tile.line, tile.begin, s, g);
  float e[kValueGroup];
  for (int64_t i = 0; i < kValueGroup; ++i) e[i] = line_error(t, tile.line + i, tile.begin, s, g);
  for (int64_t offset = 8; offset > 0; offset /= 2)
    for (int64_t i = 0; i < offset; ++i) e[i] += e[i + offset];
  return e[0];
}

template <class Lines>
QUIRE_HOST_DEVICE BlockScale nvfp4_scale(const Lines& t, const ValueTile& tile, float amax, const GlobalScale& g) {
  if (t.spec.four_over_six == FourOverSix::off) {
    const float target = amax * g.block_mult;
    return two_level_scale(kFloatMax < target ? kFloatMax : target, g);
  }
  const auto [map4, map6] = four_over_six_scales(amax, g);
  return block_error(t, tile, map4, g.stored) < block_error(t, tile, map6, g.stored) ? map4 : map6;
}

/// A block's scale as it is stored: NaN where the option `nan` says so of values that are not finite (numerics.md 1.9).
constexpr BlockScale marked(BlockScale found, const QuantSpec& spec, bool finite) {
  if (!spec.nan || finite) return found;
  found.stored = std::numeric_limits<float>::quiet_NaN();
  found.byte = spec.row().scale == ScaleKind::e8m0 ? kE8m0Nan : kBlockScaleNan;
  return found;
}

/// The scale that the values of `tile` share (sharing()), the stored one NaN where the option `nan` says so
/// (numerics.md 1.9).
template <class Lines>
QUIRE_HOST_DEVICE BlockScale block_scale(const Lines& t, const ValueTile& tile, const AboveBlock& above) {
  const FamilyRow& row = t.spec.row();
  if (row.scope != Scope::block) return f32_scale(t, above.number, above.given);
  const Measured measured = measure(t, tile);
  BlockScale found;
  if (row.scale == ScaleKind::f32) found = f32_scale(t, measured.amax, above.given);
  if (row.scale == ScaleKind::e8m0) {
    found.byte = e8m0_scale(measured.amax, t.spec.element);
    found.multiplier = e8m0_multiplier(found.byte);
  }
  if (row.scale == ScaleKind::two_level)
    found = nvfp4_scale(t, tile, measured.amax, global_scale(above.number, t.spec));
  return marked(found, t.spec, measured.finite);
}

}  // namespace quire
