// What turns the sums of a product into its output: factors of lines, bias, rounding, addend.
#pragma once

#include "quire/cpu/generic/elements/lines.inl.h"
#include "quire/cpu/generic/elements/plain.inl.h"
#include "quire/cpu/generic/gemm/panel_scales.inl.h"

/// Macro-tile of the output that one task computes: at most these rows (packed rows stay in the second-level cache) and
/// columns (each packed row serves this many).
constexpr int64_t kMacroTileRows = 384;
constexpr int64_t kMacroTileCols = 512;

struct MacroTile {
  int64_t row = 0, col = 0, rows = 0, cols = 0;
};

/// The factor of a line that does not change along the contraction (numerics.md 3.4, 5.10).
inline float line_factor(const Operand& o, int64_t outer) {
  if (o.contraction == 0) return 0.0f;
  if (!has_block_scales(o))
    return static_cast<const float*>(o.scale)[scale_index({o.spec, o.direction, o.outer, 1}, outer, 0)];
  return o.spec.row().has_amax ? global_factor(o.amax[amax_index(o.spec, outer)], o.spec) : 1.0f;
}

/// What makes a block scale of 1 under an amax of 1 mean 1 (numerics.md 5.10).
inline float constant_factor(const Operand& a, const Operand& b) {
  const auto largest_value = [](const Operand& o) {
    return has_block_scales(o) && o.spec.row().has_amax ? global_divisor(o.spec) : 1.0f;
  };
  return 1.0f / (largest_value(a) * largest_value(b));
}

/// What every row of a macro-tile needs to turn its sums into outputs.
struct ColumnFactors {
  ColumnFactors(const GemmProblem& p, const MacroTile& macro_tile) {
    for (int64_t j = 0; j < macro_tile.cols; ++j) factor[j] = line_factor(p.b, macro_tile.col + j);
    if (!p.bias) return;
    const auto* from = static_cast<const char*>(p.bias) + macro_tile.col * size_of(p.bias_dtype);
    read_line(p.bias_dtype, from, macro_tile.cols, bias);
  }
  alignas(64) float factor[kMacroTileCols] = {};
  alignas(64) float bias[kMacroTileCols] = {};
};

/// out = round(values), or round(round(values) + addend); the addend may be out itself.
inline void store_outputs(DType dtype, float* values, int64_t count, const void* addend, void* out) {
  if (addend) {
    float added[kMacroTileCols];
    uint32_t rounded[kMacroTileCols];
    read_line(dtype, addend, count, added);
    write_line(dtype, values, count, rounded);
    read_line(dtype, rounded, count, values);
    for (int64_t j = 0; j < count; ++j) values[j] += added[j];
  }
  write_line(dtype, values, count, out);
}

/// Rows of a macro-tile's micro-tiles: as few tiles as there have to be, as equally high as kernels are.
template <class MicroKernel>
int64_t tile_height(int64_t rows) {
  const int64_t down = std::max<int64_t>(1, ceil_div(rows, MicroKernel::kRows));
  return round_up(std::max<int64_t>(1, ceil_div(rows, down)), MicroKernel::kRowStep);
}

/// finish_macro_tile() with what is the same for all elements as constants.
template <class MicroKernel, DType D, bool kBias>
[[gnu::noinline]] void finish_rows(const GemmProblem& p, const MacroTile& macro_tile, const float* sum) {
  // What does not depend on the row: factors and biases of columns, the constant of both formats.
  const ColumnFactors columns(p, macro_tile);
  const F32 constant = broadcast(constant_factor(p.a, p.b) * MicroKernel::kUnit);
  constexpr int64_t cols = MicroKernel::kVectors * kLanes;
  const int64_t tile_stride = round_up(macro_tile.rows, tile_height<MicroKernel>(macro_tile.rows)) * cols;
  for (int64_t i = 0; i < macro_tile.rows; ++i, sum += cols) {
    const F32 row_factor = broadcast(line_factor(p.a, macro_tile.row + i));
    const auto value = [&](int64_t j) {
      // The sum first: factors alone may leave float32 where the output is an ordinary number.
      const F32 scaled = load(sum + j / cols * tile_stride + j % cols) * constant * row_factor;
      const F32 factored = scaled * load(columns.factor + j);
      return kBias ? factored + load(columns.bias + j) : factored;
    };
    // Whole pairs of vectors go straight to the output, if nothing is added to it.
    const int64_t at = (macro_tile.row + i) * p.out.row_stride + macro_tile.col;
    auto* const out = static_cast<Plain<D>*>(p.out.data) + at;
    int64_t j = 0;
    if (!p.addend)
      for (; j + 2 * kLanes <= macro_tile.cols; j += 2 * kLanes)
        store_as<D, Known::nothing>(out + j, value(j), value(j + kLanes));
    if (j == macro_tile.cols) continue;
    // The rest of the row, or all of it under an addend: as float32 first. Sums are padded, so whole vectors may be
    // read.
    alignas(64) float rest[kMacroTileCols];
    for (int64_t k = j; k < macro_tile.cols; k += kLanes) store(rest + k - j, value(k));
    const auto* const addend = static_cast<const Plain<D>*>(p.addend);
    store_outputs(D, rest, macro_tile.cols - j, addend ? addend + at + j : nullptr, out + j);
  }
}

/// Scales, biases and rounds the sums of a macro-tile.
template <class MicroKernel>
void finish_macro_tile(const GemmProblem& p, const MacroTile& macro_tile, const float* sum) {
  with_dtype(p.out.dtype, [&](auto d) {
    p.bias ? finish_rows<MicroKernel, d, true>(p, macro_tile, sum)
           : finish_rows<MicroKernel, d, false>(p, macro_tile, sum);
  });
}
