#include "quire/reference/quantize.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "quire/base/float_mode.h"
#include "quire/format/codec.h"
#include "quire/format/element.h"
#include "quire/spec/hadamard.h"
#include "quire/spec/random.h"
#include "quire/spec/scale.h"
#include "quire/spec/scale_index.h"

namespace quire::reference {
namespace {

/// What one direction quantizes: the values, Hadamard-transformed if the spec says so, as lines of `contraction`
/// values.
struct Lines {
  const QuantizeProblem& problem;
  Direction direction;
  int64_t outer, contraction, block, blocks;
  std::vector<float> values;

  const QuantSpec& spec() const { return problem.spec; }
  /// Elements that a ragged block or tile lacks count as +0 (numerics.md 0.12).
  float at(int64_t o, int64_t l) const { return o < outer && l < contraction ? values[index(o, l)] : 0.0f; }
  size_t index(int64_t o, int64_t l) const { return static_cast<size_t>(o * contraction + l); }
  int64_t end_of(int64_t b) const { return std::min(contraction, (b + 1) * block); }
  /// Lines that have scales of their own; a scale of the whole tensor counts as one line's.
  int64_t scale_lines() const { return spec().row().scope == Scope::tensor ? 1 : outer; }
};

void transform(Lines& t) {
  const bool signs = t.spec().hadamard == Hadamard::signs;
  for (int64_t o = 0; o < t.outer; ++o)
    for (int64_t l = 0; l < t.contraction; l += kHadamardSize) {
      float group[kHadamardSize];
      for (int64_t i = 0; i < kHadamardSize; ++i) group[i] = t.at(o, l + i);
      hadamard16(group, signs);
      for (int64_t i = 0; i < kHadamardSize; ++i) t.values[t.index(o, l + i)] = bf16_to_f32(f32_to_bf16(group[i]));
    }
}

Lines read_lines(const QuantizeProblem& p, Direction direction) {
  const bool columnwise = direction == Direction::columnwise;
  const int64_t outer = columnwise ? p.x.cols : p.x.rows;
  const int64_t existing = columnwise ? p.x.rows : p.x.cols;
  const int64_t contraction = columnwise ? columnwise_tokens(p.spec, existing) : existing;
  Lines t{p, direction, outer, contraction, block_length(p.spec, contraction), block_count(p.spec, contraction), {}};
  t.values.resize(static_cast<size_t>(outer * contraction), 0.0f);
  for (int64_t o = 0; o < outer; ++o)
    for (int64_t l = 0; l < existing; ++l) {
      const int64_t row = columnwise ? l : o, col = columnwise ? o : l;
      t.values[t.index(o, l)] = load_element(p.x.data, p.x.dtype, row * p.x.row_stride + col);
    }
  if (columnwise && p.spec.hadamard != Hadamard::off) transform(t);
  return t;
}

/// max |x| of lines [first, last), positions [begin, end). NaN fails the comparison, so it never counts (numerics.md
/// 0.8).
float amax_of(const Lines& t, std::array<int64_t, 2> lines, std::array<int64_t, 2> positions) {
  float amax = 0;
  for (int64_t o = lines[0]; o < std::min(lines[1], t.outer); ++o)
    for (int64_t l = positions[0]; l < std::min(positions[1], t.contraction); ++l)
      if (std::fabs(t.at(o, l)) > amax) amax = std::fabs(t.at(o, l));
  return amax;
}

/// Whether the option `nan` makes a scale NaN: where an element is NaN or Inf (numerics.md 1.9).
bool is_lost(const Lines& t, std::array<int64_t, 2> lines, std::array<int64_t, 2> positions) {
  bool finite = true;
  for (int64_t o = lines[0]; o < std::min(lines[1], t.outer); ++o)
    for (int64_t l = positions[0]; l < std::min(positions[1], t.contraction); ++l) finite &= is_finite(t.at(o, l));
  return t.spec().nan && !finite;
}

/// The lines whose elements share the scales of line o.
std::array<int64_t, 2> sharing(const Lines& t, int64_t o) {
  if (t.spec().row().scope == Scope::tensor) return {0, t.outer};
  if (!t.spec().square) return {o, o + 1};
  return {o / t.block * t.block, o / t.block * t.block + t.block};
}

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// What a block's elements are multiplied by, and what is stored: a float32 or a byte.
struct BlockScale {
  float multiplier = 1;
  float stored = 1;
  uint8_t byte = 0;
};

BlockScale f32_scale(const Lines& t, float amax) {
  const float infinite = t.spec().row().scope == Scope::block ? largest_finite(t.problem.x.dtype) : kFloatMax;
  const bool lost = t.spec().nan && !is_finite(amax);  // also where a scale is given
  if (t.spec().given) return {.multiplier = 1.0f / *t.problem.scale, .stored = lost ? kNan : *t.problem.scale};
  const float s = t.problem.scale ? *t.problem.scale : scale_from_amax(amax, t.spec(), infinite);
  return {.multiplier = s, .stored = lost ? kNan : 1.0f / s};
}

BlockScale e8m0_block_scale(const Lines& t, float amax) {
  const uint8_t byte = e8m0_scale(amax, t.spec().element);
  return {.multiplier = e8m0_multiplier(byte), .byte = byte};
}

BlockScale rounded_block_scale(float target, const GlobalScale& g) {
  const uint8_t byte = static_cast<uint8_t>(encode(kBlockScaleFormat, target));
  return {.multiplier = nvfp4_multiplier(decode(kBlockScaleFormat, byte), g), .byte = byte};
}

/// numerics.md 5.8, 5.11: error of line o's block under a candidate scale and the stored g, summed in order.
float line_error(const Lines& t, int64_t o, int64_t b, const BlockScale& s, float g) {
  const float scale = decode(kBlockScaleFormat, s.byte), most = 6.0f * t.spec().block_scale_max();
  float error = 0;
  for (int64_t l = b * t.block; l < (b + 1) * t.block; ++l) {
    const float x = t.at(o, l);
    const float code = decode(t.spec().element, encode(t.spec().element, x * s.multiplier));
    const bool amax = t.spec().global == Global::amax;
    const float d = (amax ? code * scale * g / most : code * nvfp4_value(scale, g, t.spec())) - x;
    error += t.spec().four_over_six == FourOverSix::mae ? std::fabs(d) : d * d;
  }
  return error;
}

/// The error of a block, or of a tile: its lines summed by a tree.
float block_error(const Lines& t, int64_t o, int64_t b, const BlockScale& s, float g) {
  if (!t.spec().square) return line_error(t, o, b, s, g);
  float e[16];
  for (int64_t i = 0; i < 16; ++i) e[i] = line_error(t, o / 16 * 16 + i, b, s, g);
  for (int64_t offset = 8; offset > 0; offset /= 2)
    for (int64_t i = 0; i < offset; ++i) e[i] += e[i + offset];
  return e[0];
}

BlockScale nvfp4_scale(const Lines& t, int64_t o, int64_t b, float amax, const GlobalScale& g) {
  if (t.spec().four_over_six == FourOverSix::off)
    return rounded_block_scale(std::min(amax * g.block_mult, kFloatMax), g);
  const float base = amax / 6.0f * g.encode;
  const BlockScale map4 = rounded_block_scale(std::min(base * 1.5f, 448.0f), g);
  const BlockScale map6 = rounded_block_scale(std::min(base, 448.0f), g);
  return block_error(t, o, b, map4, g.stored) < block_error(t, o, b, map6, g.stored) ? map4 : map6;
}

/// The amax above the blocks that line o's scales follow from.
float amax_above(const Lines& t, int64_t o) {
  const bool per_line = t.spec().row_scaled || t.spec().row().scope == Scope::row;
  if (const float* given = t.problem.amax.of(t.direction)) return given[per_line ? o : 0];
  const std::array<int64_t, 2> lines = per_line ? std::array<int64_t, 2>{o, o + 1} : std::array{int64_t{0}, t.outer};
  return amax_of(t, lines, {0, t.contraction});
}

void write_amaxes(const Lines& t, float* amax) {
  const int64_t count = t.spec().row().has_amax ? amax_count(t.spec(), t.outer) : 0;
  const bool given = t.spec().given && t.spec().row().scale == ScaleKind::two_level;
  for (int64_t o = 0; o < count; ++o) amax[o] = given ? *t.problem.scale : stored_global(amax_above(t, o), t.spec());
}

BlockScale block_scale(const Lines& t, int64_t o, int64_t b, const float* globals) {
  if (t.spec().row().scope != Scope::block) return f32_scale(t, amax_above(t, o));
  const std::array positions{b * t.block, (b + 1) * t.block};
  const float amax = amax_of(t, sharing(t, o), positions);
  const ScaleKind kind = t.spec().row().scale;
  BlockScale found;
  if (kind == ScaleKind::f32) found = f32_scale(t, amax);
  if (kind == ScaleKind::e8m0) found = e8m0_block_scale(t, amax);
  if (kind == ScaleKind::two_level)
    found = nvfp4_scale(t, o, b, amax, global_scale(globals[amax_index(t.spec(), o)], t.spec()));
  if (is_lost(t, sharing(t, o), positions)) {
    found.stored = kNan;
    found.byte = kind == ScaleKind::e8m0 ? kE8m0Nan : kBlockScaleNan;
  }
  return found;
}

/// One per (scale line, block), [scale_lines, blocks].
std::vector<BlockScale> block_scales(const Lines& t, const float* globals) {
  std::vector<BlockScale> out(static_cast<size_t>(t.scale_lines() * t.blocks));
  for (int64_t o = 0; o < t.scale_lines(); ++o)
    for (int64_t b = 0; b < t.blocks; ++b) {
      const int64_t first = sharing(t, o)[0];
      // The first line of a tile has found the scale for the others.
      out[static_cast<size_t>(o * t.blocks + b)] =
          first < o ? out[static_cast<size_t>(first * t.blocks + b)] : block_scale(t, o, b, globals);
    }
  return out;
}

void write_scales(const Lines& t, const std::vector<BlockScale>& scales, void* buffer) {
  const bool bytes = t.spec().row().scale != ScaleKind::f32;
  const Matrix& x = t.problem.x;
  const Shape<int64_t> sizes = buffers<int64_t>(t.spec(), {x.rows, x.cols}, t.direction).scale.sizes;
  // Swizzled and interleaved scales are padded with zeros.
  if (bytes) std::fill_n(static_cast<uint8_t*>(buffer), product(sizes, 0, sizes.size()), uint8_t{0});
  for (int64_t o = 0; o < t.scale_lines(); ++o)
    for (int64_t b = 0; b < t.blocks; ++b) {
      const BlockScale& s = scales[static_cast<size_t>(o * t.blocks + b)];
      const int64_t i = scale_index({t.spec(), t.direction, t.outer, t.blocks}, o, b);
      if (bytes) static_cast<uint8_t*>(buffer)[i] = s.byte;
      if (!bytes) static_cast<float*>(buffer)[i] = s.stored;
    }
}

/// numerics.md 0.11: the byte of element (o, l).
uint8_t random_byte_of(const Lines& t, int64_t o, int64_t l) {
  const Randomness& r = t.problem.random;
  const uint64_t offset = t.direction == Direction::rowwise ? r.rowwise_offset : r.columnwise_offset;
  const auto words =
      philox(r.seed, offset, static_cast<uint64_t>(r.number(t.direction, {t.outer, t.blocks}, o, l / t.block)));
  return random_byte(words, static_cast<int>(l % t.block));
}

void write_codes(const Lines& t, const std::vector<BlockScale>& scales, uint8_t* data) {
  const Shape<int64_t> sizes = buffers<int64_t>(t.spec(), {t.problem.x.rows, t.problem.x.cols}, t.direction).data.sizes;
  if (t.spec().interleaved) std::fill_n(data, product(sizes, 0, sizes.size()), uint8_t{0});
  for (int64_t o = 0; o < t.outer; ++o)
    for (int64_t l = 0; l < t.contraction; ++l) {
      const int64_t line = std::min(o, t.scale_lines() - 1);
      const float scaled = t.at(o, l) * scales[static_cast<size_t>(line * t.blocks + l / t.block)].multiplier;
      const int code =
          t.spec().stochastic ? encode_stochastic(scaled, random_byte_of(t, o, l)) : encode(t.spec().element, scaled);
      const int64_t i = data_index({t.spec(), t.direction, t.outer, t.contraction}, o, l);
      if (!t.spec().packed()) {
        data[i] = static_cast<uint8_t>(code);
      } else {
        // Written low nibble first, so that a padding nibble stays 0.
        const unsigned low = i % 2 ? data[i / 2] : static_cast<unsigned>(code);
        data[i / 2] = pack(low, i % 2 ? static_cast<unsigned>(code) : 0u);
      }
    }
}

void quantize_side(const QuantizeProblem& p, Direction direction, const Side& side) {
  if (side.data == nullptr) return;
  const Lines t = read_lines(p, direction);
  write_amaxes(t, side.amax);
  const std::vector<BlockScale> scales = block_scales(t, side.amax);
  write_scales(t, scales, side.scale);
  write_codes(t, scales, static_cast<uint8_t*>(side.data));
}

void measure_side(const AmaxProblem& p, Direction direction, float* to) {
  if (!to) return;
  const QuantizeProblem quantization{.spec = p.spec, .x = p.x, .rowwise = {}, .columnwise = {}, .random = {}};
  const Lines t = read_lines(quantization, direction);
  for (int64_t o = 0; o < amax_count(p.spec, t.outer); ++o) to[o] = amax_above(t, o);
}

/// The scale of code (o, block b) as a multiplier of its value.
float scale_value(const DequantizeProblem& p, int64_t index, int64_t o) {
  const ScaleKind kind = p.spec.row().scale;
  if (kind == ScaleKind::f32) return static_cast<const float*>(p.scale)[index];
  const uint8_t byte = static_cast<const uint8_t*>(p.scale)[index];
  if (kind == ScaleKind::e8m0) return e8m0_value(byte);
  return nvfp4_value(decode(kBlockScaleFormat, byte), p.amax[amax_index(p.spec, o)], p.spec);
}

}  // namespace

void quantize(const QuantizeProblem& problem) {
  FloatMode mode;
  quantize_side(problem, Direction::rowwise, problem.rowwise);
  quantize_side(problem, Direction::columnwise, problem.columnwise);
}

void amax(const AmaxProblem& problem) {
  FloatMode mode;
  measure_side(problem, Direction::rowwise, problem.rowwise);
  measure_side(problem, Direction::columnwise, problem.columnwise);
}

Statistics statistics(const QuantizeProblem& p, Direction direction) {
  FloatMode mode;
  const Side& side = direction == Direction::rowwise ? p.rowwise : p.columnwise;
  const Lines t = read_lines(p, direction);
  const std::vector<BlockScale> scales = block_scales(t, side.amax);
  const float top = largest(p.spec.element), below = decode(p.spec.element, p.spec.element_row().max_code() - 1);
  const float limit = top + (top - below) / 2;
  const int magnitude = p.spec.element_row().magnitudes() - 1;
  Statistics n{.elements = t.outer * t.contraction};
  for (int64_t o = 0; o < t.outer; ++o)
    for (int64_t l = 0; l < t.contraction; ++l) {
      const float value = t.at(o, l);
      const int64_t line = std::min(o, t.scale_lines() - 1);
      const BlockScale& scale = scales[static_cast<size_t>(line * t.blocks + l / t.block)];
      const int64_t i = data_index({p.spec, direction, t.outer, t.contraction}, o, l);
      const auto code = static_cast<int>(code_at(p.spec, static_cast<const uint8_t*>(side.data), i));
      n.nonfinite += !is_finite(value);
      n.saturated += is_finite(value) && !std::isnan(scale.stored) && std::fabs(value * scale.multiplier) > limit;
      n.underflowed += is_finite(value) && value != 0 && (code & magnitude) == 0;
    }
  return n;
}

void dequantize(const DequantizeProblem& p) {
  FloatMode mode;
  const int64_t outer = p.out.rows, contraction = p.out.cols;
  const int64_t block = block_length(p.spec, contraction), blocks = block_count(p.spec, contraction);
  for (int64_t o = 0; o < outer; ++o)
    for (int64_t l = 0; l < contraction; ++l) {
      const int64_t i = data_index({p.spec, p.direction, outer, contraction}, o, l);
      const int code = static_cast<int>(code_at(p.spec, static_cast<const uint8_t*>(p.data), i));
      const float scale = scale_value(p, scale_index({p.spec, p.direction, outer, blocks}, o, l / block), o);
      store_element(p.out.data, p.out.dtype, o * p.out.row_stride + l, decode(p.spec.element, code) * scale);
    }
}

}  // namespace quire::reference
