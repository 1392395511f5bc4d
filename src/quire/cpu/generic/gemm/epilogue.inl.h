// What turns the sums of a product into its output: factors of lines, bias, rounding, addend.
#pragma once

#include "quire/cpu/generic/elements/lines.inl.h"
#include "quire/cpu/generic/elements/plain.inl.h"
#include "quire/cpu/generic/gemm/slab_scales.inl.h"

/// Region of the output that one task computes: at most these rows (packed rows stay in the second-level cache) and
/// columns (each packed row serves this many).
constexpr int64_t kRegionRows = 384;
constexpr int64_t kRegionCols = 512;

struct Region {
  int64_t row = 0, col = 0, rows = 0, cols = 0;
};

/// The factor of a line that does not change along the contraction (numerics.md 3.4, 5.10).
inline float line_factor(const Operand& o, int64_t outer) {
  if (o.contraction == 0) return 0.0f;
  if (!has_block_scales(o))
    return static_cast<const float*>(o.scale)[scale_index({o.spec, o.direction, o.outer, 1}, outer, 0)];
  return o.spec.row().has_amax ? o.amax[amax_index(o.spec, outer)] : 1.0f;
}

/// What makes a block scale of 1 under an amax of 1 mean 1 (numerics.md 5.10).
inline float constant_factor(const Operand& a, const Operand& b) {
  const auto largest_value = [](const Operand& o) {
    return has_block_scales(o) && o.spec.row().has_amax ? largest(o.spec.element) * o.spec.e4m3_max() : 1.0f;
  };
  return 1.0f / (largest_value(a) * largest_value(b));
}

/// What every row of a region needs to turn its sums into outputs.
struct Columns {
  Columns(const GemmProblem& p, const Region& region) {
    for (int64_t j = 0; j < region.cols; ++j) factor[j] = line_factor(p.b, region.col + j);
    if (!p.bias) return;
    const auto* from = static_cast<const char*>(p.bias) + region.col * size_of(p.bias_dtype);
    read_line(p.bias_dtype, from, region.cols, bias);
  }
  alignas(64) float factor[kRegionCols] = {};
  alignas(64) float bias[kRegionCols] = {};
};

/// out = round(values), or round(round(values) + addend); the addend may be out itself.
inline void store_outputs(DType dtype, float* values, int64_t count, const void* addend, void* out) {
  if (addend) {
    float added[kRegionCols];
    uint32_t rounded[kRegionCols];
    read_line(dtype, addend, count, added);
    write_line(dtype, values, count, rounded);
    read_line(dtype, rounded, count, values);
    for (int64_t j = 0; j < count; ++j) values[j] += added[j];
  }
  write_line(dtype, values, count, out);
}

/// Rows of a region's register tiles: as few tiles as there have to be, as equally high as kernels are.
template <class L>
int64_t tile_height(int64_t rows) {
  const int64_t down = std::max<int64_t>(1, ceil_div(rows, L::kRows));
  return round_up(std::max<int64_t>(1, ceil_div(rows, down)), L::kRowStep);
}

/// finish_region() with what is the same for all elements as constants.
template <class L, DType D, bool kBias>
void finish_rows(const GemmProblem& p, const Region& region, const float* sum) {
  const Columns columns(p, region);
  const F32 constant = broadcast(constant_factor(p.a, p.b) * L::kUnit);
  constexpr int64_t cols = L::kVectors * kLanes;
  const int64_t tile_stride = round_up(region.rows, tile_height<L>(region.rows)) * cols;
  for (int64_t i = 0; i < region.rows; ++i, sum += cols) {
    const F32 row_factor = broadcast(line_factor(p.a, region.row + i));
    const auto value = [&](int64_t j) {
      // The sum first: factors alone may leave float32 where the output is an ordinary number.
      const F32 scaled = load(sum + j / cols * tile_stride + j % cols) * constant * row_factor;
      const F32 factored = scaled * load(columns.factor + j);
      return kBias ? factored + load(columns.bias + j) : factored;
    };
    const int64_t at = (region.row + i) * p.out.row_stride + region.col;
    auto* const out = static_cast<Plain<D>*>(p.out.data) + at;
    int64_t j = 0;
    if (!p.addend)
      for (; j + 2 * kLanes <= region.cols; j += 2 * kLanes)
        store_as<D, Known::nothing>(out + j, value(j), value(j + kLanes));
    if (j == region.cols) continue;
    alignas(64) float rest[kRegionCols];
    for (int64_t k = j; k < region.cols; k += kLanes) store(rest + k - j, value(k));
    const auto* const addend = static_cast<const Plain<D>*>(p.addend);
    store_outputs(D, rest, region.cols - j, addend ? addend + at + j : nullptr, out + j);
  }
}

/// Scales, biases and rounds the sums of a region.
template <class L>
void finish_region(const GemmProblem& p, const Region& region, const float* sum) {
  with_dtype(p.out.dtype, [&](auto d) {
    p.bias ? finish_rows<L, d, true>(p, region, sum) : finish_rows<L, d, false>(p, region, sum);
  });
}
