#include "quire/reference/quantize.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "quire/base/float_mode.h"
#include "quire/spec/block_codes.h"
#include "quire/spec/groups.h"

namespace quire::reference {
namespace {

/// Lines that have scales of their own; a scale of the whole tensor counts as one line's.
int64_t scale_lines(const ValueLines& t) { return t.spec.row().scope == Scope::tensor ? 1 : t.outer; }

/// The amax above the blocks that line o's scales follow from.
float amax_above(const ValueLines& t, const GivenAmax& known, int64_t o) {
  const bool per_line = has_amax_per_line(t.spec);
  if (const float* given = known.of(t.direction)) return given[per_line ? o : 0];
  return measure(t, {per_line ? o : 0, per_line ? 1 : t.outer, 0, t.contraction}).amax;
}

void write_amaxes(const ValueLines& t, const QuantizeProblem& p, float* amax) {
  const int64_t count = t.spec.row().has_amax ? amax_count(t.spec, t.outer) : 0;
  for (int64_t o = 0; o < count; ++o) amax[o] = number_above(t.spec, amax_above(t, p.amax, o), p.scale);
}

/// One per (scale line, block), [scale_lines, blocks]. amax: as write_amaxes() has written it.
std::vector<BlockScale> block_scales(const ValueLines& t, const QuantizeProblem& p, const float* amax) {
  const bool two_level = t.spec.row().scale == ScaleKind::two_level;
  std::vector<BlockScale> out(static_cast<size_t>(scale_lines(t) * t.blocks));
  for (int64_t o = 0; o < scale_lines(t); ++o) {
    AboveBlock above{.given = p.scale};
    if (t.spec.row().scope != Scope::block) above.number = amax_above(t, p.amax, o);
    if (two_level) above.number = amax[amax_index(t.spec, o)];
    for (int64_t b = 0; b < t.blocks; ++b) {
      const ValueTile tile = sharing(t, o, b);
      // The first line of a tile has found the scale for the others.
      out[static_cast<size_t>(o * t.blocks + b)] =
          tile.line < o ? out[static_cast<size_t>(tile.line * t.blocks + b)] : block_scale(t, tile, above);
    }
  }
  return out;
}

const BlockScale& scale_of(const ValueLines& t, const std::vector<BlockScale>& scales, int64_t o, int64_t l) {
  return scales[static_cast<size_t>(std::min(o, scale_lines(t) - 1) * t.blocks + l / t.block)];
}

/// Swizzled and interleaved buffers are padded with zeros.
void clear(const Buffer<int64_t>& buffer, void* data) {
  std::fill_n(static_cast<uint8_t*>(data), product(buffer.sizes, 0, buffer.sizes.size()), uint8_t{0});
}

void quantize_side(const QuantizeProblem& p, Direction direction, const Side& side) {
  if (side.data == nullptr) return;
  const ValueLines t(p.spec, p.x, direction);
  const Buffers<int64_t> layout = buffers<int64_t>(p.spec, {p.x.rows, p.x.cols}, direction);
  if (has_byte_scales(p.spec)) clear(layout.scale, side.scale);
  if (p.spec.interleaved) clear(layout.data, side.data);

  write_amaxes(t, p, side.amax);
  const std::vector<BlockScale> scales = block_scales(t, p, side.amax);
  for (int64_t o = 0; o < scale_lines(t); ++o)
    for (int64_t b = 0; b < t.blocks; ++b)
      write_scale(t, {o, b}, scales[static_cast<size_t>(o * t.blocks + b)], side.scale);
  for (int64_t o = 0; o < t.outer; ++o)
    for (int64_t l = 0; l < t.contraction; l += kValueGroup)
      write_codes(t, {o, l}, scale_of(t, scales, o, l).multiplier, p.random, static_cast<uint8_t*>(side.data));
}

void measure_side(const AmaxProblem& p, Direction direction, float* to) {
  if (!to) return;
  const ValueLines t(p.spec, p.x, direction);
  for (int64_t o = 0; o < amax_count(p.spec, t.outer); ++o) to[o] = amax_above(t, {}, o);
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
  const ValueLines t(p.spec, p.x, direction);
  const std::vector<BlockScale> scales = block_scales(t, p, side.amax);
  const float top = largest(p.spec.element), below = decode(p.spec.element, p.spec.element_row().max_code() - 1);
  const float limit = top + (top - below) / 2;
  const int magnitude = p.spec.element_row().magnitudes() - 1;
  const DequantizeProblem codes{.spec = p.spec,
                                .direction = direction,
                                .data = side.data,
                                .scale = side.scale,
                                .amax = side.amax,
                                .out = {.rows = t.outer, .cols = t.contraction}};
  Statistics n{.elements = t.outer * t.contraction};
  float group[kValueGroup];
  for (int64_t o = 0; o < t.outer; ++o)
    for (int64_t l = 0; l < t.contraction; ++l) {
      if (l % kValueGroup == 0) t.read(group, o, l);
      const float value = group[l % kValueGroup];
      const BlockScale& scale = scale_of(t, scales, o, l);
      const int64_t i = data_index({p.spec, direction, t.outer, t.contraction}, o, l);
      const auto code = static_cast<int>(code_at(p.spec, static_cast<const uint8_t*>(side.data), i));
      n.nonfinite += !is_finite(value);
      n.saturated += is_finite(value) && !std::isnan(scale.stored) && std::fabs(value * scale.multiplier) > limit;
      n.underflowed += is_finite(value) && value != 0 && (code & magnitude) == 0;
      if (!is_finite(value)) continue;
      n.amax = std::max(n.amax, std::fabs(value));
      const float decoded = value_of(codes, o, l);
      if (!is_finite(decoded)) continue;
      const double error = static_cast<double>(decoded) - value;
      ++n.measured;
      n.squares += static_cast<double>(value) * value;
      n.errors += error * error;
    }
  return n;
}

void dequantize(const DequantizeProblem& p) {
  FloatMode mode;
  for (int64_t o = 0; o < p.out.rows; ++o)
    for (int64_t l = 0; l < p.out.cols; ++l)
      store_element(p.out.data, p.out.dtype, o * p.out.row_stride + l, value_of(p, o, l));
}

}  // namespace quire::reference
