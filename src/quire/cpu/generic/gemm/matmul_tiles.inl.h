// Products of plain matrices in bfloat16 (numerics.md 6.12) by tiles. Lines of one operand are rows of tiles, those of
// the other are columns. Every output is one sum, in the order of the contraction, so it depends on its two lines
// alone.
#pragma once

#include "quire/cpu/generic/elements/lines.inl.h"
#include "quire/cpu/generic/gemm/amx_microkernel.inl.h"
#include "quire/cpu/generic/gemm/gemm.inl.h"

/// Rows and columns of the sums that four tiles hold.
constexpr int64_t kTiled = 32;
/// Lanes that a tile of rows or columns is deep: pairs of bfloat16.
constexpr int64_t kTiledLanes = 16;
/// Lanes of all columns of a task that are packed at a time: they stay in the second-level cache.
constexpr int64_t kTiledColumnLanes = kMacroTileRows * 128;
/// Most columns for which rows are read where they lie. More read them again, and rows that are a power of two apart
/// share cache sets, so that packing them pays.
constexpr int64_t kReadInPlace = 128;

/// A matrix as lines along the contraction.
struct TiledLines {
  Matrix from;
  bool across;  ///< lines are columns of the matrix

  int64_t lines() const { return across ? from.cols : from.rows; }
  int64_t contraction() const { return across ? from.rows : from.cols; }

  /// Where 32 lines lie from a position on, if tiles can read them there as rows: else null.
  const float* in_place(int64_t first, int64_t begin, int64_t end) const {
    const bool whole = first + kTiled <= lines() && end <= contraction();
    if (across || from.dtype != DType::bf16 || from.row_stride % 2 != 0 || !whole) return nullptr;
    return static_cast<const float*>(element_of(from, first, begin));
  }

  /// Packs 16 lanes of 16 lines as rows, `to_stride` floats apart, or as columns, of which one lane follows another.
  void pack(int64_t first, int64_t begin, bool as_rows, float* to, int64_t to_stride) const {
    F32 square[kLanes];
    read(first, begin, square);
    if (as_rows == across) transpose(square);
    for (int64_t i = 0; i < kLanes; ++i) store(to + i * to_stride, square[i]);
  }

 private:
  /// 16 lanes of 16 lines, and zeros beyond the end: vectors of a lane each if lines lie across, else of a line each.
  void read(int64_t first, int64_t begin, F32 (&square)[kLanes]) const {
    const int64_t count = std::min<int64_t>(kLanes, lines() - first),
                  size = std::min(2 * kTiledLanes, contraction() - begin);
    const int64_t row = across ? begin : first, col = across ? first : begin;
    if (from.dtype == DType::bf16 && count == kLanes && size == 2 * kTiledLanes)
      return load_square(static_cast<const uint16_t*>(element_of(from, row, col)), from.row_stride, square);
    uint16_t padded[2 * kTiledLanes * kLanes] = {};
    const int64_t rows = across ? size : count, cols = across ? count : size,
                  stride = across ? kLanes : 2 * kTiledLanes;
    for (int64_t i = 0; i < rows && cols > 0; ++i) {
      float line[2 * kTiledLanes];
      read_line(from.dtype, element_of(from, row + i, col), cols, line);
      write_line(DType::bf16, line, cols, padded + i * stride);
    }
    load_square(padded, stride, square);
  }

  void load_square(const uint16_t* at, int64_t stride, F32 (&square)[kLanes]) const {
    for (int64_t i = 0; i < kLanes; ++i) {
      if (across) {
        square[i] = float_of(load_u16(at + 2 * i * stride) | load_u16(at + (2 * i + 1) * stride) << 16);
      } else {
        square[i] = reinterpret_cast<F32>(load_bytes(at + i * stride));
      }
    }
  }
};

/// A problem and how its operands become tiles. Names of rows and columns are those of tiles: the output is `swapped`
/// if they are its columns and rows.
struct TiledMatmul {
  const MatmulProblem& p;
  const TiledLines a{p.a, p.transpose_a}, b{p.b, !p.transpose_b};
  /// Rows of tiles need no packing if they lie along the contraction: those of the operand that has more lines, such as
  /// a weight.
  const bool swapped = !b.across && (a.across || b.lines() > a.lines());
  const TiledLines &rows = swapped ? b : a, &cols = swapped ? a : b;
  const int64_t lanes = round_up(ceil_div(rows.contraction(), 2), kTiledLanes);

  void multiply_matrix() const {
    if (p.out.rows == 0 || p.out.cols == 0) return;
    const OutputCut cut = cut_output<AmxMicroKernel>(cols.lines(), rows.lines(), rows.contraction());
    parallel_for(cut.count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const int64_t row = t % cut.across * cut.cols, col = t / cut.across * cut.rows;
        multiply_macro_tile({row, col, std::min(cut.cols, rows.lines() - row), std::min(cut.rows, cols.lines() - col)});
      }
    });
  }

 private:
  /// Memory of one task, and the lanes that it packs at a time.
  struct TiledMemory {
    const MacroTile& tile;
    const int64_t across = round_up(tile.cols, kTiled), down = round_up(tile.rows, kTiled);
    const int64_t depth, row_stride = depth + kTiledLanes;  // so rows do not share cache sets
    const ThreadMemory memory{static_cast<int64_t>(sizeof(float)) * (across * (down + depth) + kTiled * row_stride)};
    float* const sums = static_cast<float*>(memory.get());  // [down / 32][across / 32][32][32]
    float *const columns = sums + across * down, *const rows = columns + across * depth;

    TiledMemory(const MacroTile& t, int64_t lanes)
        : tile(t), depth(std::min(lanes, kTiledColumnLanes / across / kTiledLanes * kTiledLanes)) {}
  };

  void multiply_macro_tile(const MacroTile& tile) const {
    const TiledMemory w(tile, lanes);
    const TileSession<kTiledLanes> session(tile.rows);
    int64_t begin = 0, end = 0;
    do {  // also without positions, where sums are 0
      begin = end, end = std::min(lanes, begin + w.depth);
      for (int64_t l = begin; l < end; l += kTiledLanes)
        for (int64_t j = 0; j < w.across; j += kLanes)
          cols.pack(tile.col + j, 2 * l, false, w.columns + j * w.depth + (l - begin) * kLanes, kLanes);
      for (int64_t i = 0; i < w.down; i += kTiled) multiply_panel(w, i, begin, end);
    } while (end < lanes);
  }

  /// Lanes [begin, end) of 32 rows from the i-th on, with all columns that are packed.
  void multiply_panel(const TiledMemory& w, int64_t i, int64_t begin, int64_t end) const {
    const int64_t row = w.tile.row + i;
    const float* from = w.across > kReadInPlace ? nullptr : rows.in_place(row, 2 * begin, 2 * end);
    const int64_t stride = from ? rows.from.row_stride / 2 : w.row_stride;
    if (!from) from = pack_rows(row, begin, end, w.rows, w.row_stride);
    for (int64_t j = 0; j < w.across; j += kTiled) {
      float* const sum = w.sums + i * w.across + j * kTiled;
      add_products({w.tile.rows - i, from, stride, w.columns + j * w.depth, w.depth * kLanes, end - begin}, begin == 0,
                   sum);
      if (end == lanes) write(row, w.tile.col + j, sum);
    }
  }

  const float* pack_rows(int64_t row, int64_t begin, int64_t end, float* to, int64_t stride) const {
    for (int64_t i = 0; i < kTiled; i += kLanes)
      for (int64_t l = begin; l < end; l += kTiledLanes)
        rows.pack(row + i, 2 * l, true, to + i * stride + l - begin, stride);
    return to;
  }

  /// What is multiplied for 32 x 32 sums: rows [32][lanes] and columns [2][lanes][16].
  struct Panel {
    int64_t rows;
    const float* a;
    int64_t row_stride;
    const float* b;
    int64_t group_stride, lanes;
  };

  static void add_products(const Panel& panel, bool first, float* sums) {
    panel.rows > kLanes ? add_rows<kTiled>(panel, first, sums) : add_rows<kLanes>(panel, first, sums);
  }
  template <int kRows>
  static void add_rows(const Panel& panel, bool first, float* sums) {
    first ? zero_tiles<kRows>() : load_sums<kRows>(sums);
    for (int64_t l = 0; l < panel.lanes; l += kTiledLanes)
      multiply_tiles<kRows>(panel.a + l, panel.row_stride, panel.b + l * kLanes,
                            panel.b + panel.group_stride + l * kLanes);
    store_sums<kRows>(sums);
  }

  /// 32 x 32 sums to the output, with the bias.
  void write(int64_t row, int64_t col, float* sums) const {
    if (swapped) {
      transpose_sums(sums);
      std::swap(row, col);
    }
    const int64_t width = std::min(kTiled, p.out.cols - col);
    float bias[kTiled] = {};
    if (p.bias.data) {
      read_line(p.bias.dtype, static_cast<const char*>(p.bias.data) + col * size_of(p.bias.dtype), width, bias);
      round_line<kTiled>(DType::bf16, width, bias);
    }
    for (int64_t i = 0; i < std::min(kTiled, p.out.rows - row); ++i) {
      float* const line = sums + i * kTiled;
      for (int64_t j = 0; j < kTiled; j += kLanes) store(line + j, load(line + j) + load(bias + j));
      write_line(DType::bf16, line, width, static_cast<uint16_t*>(p.out.data) + (row + i) * p.out.row_stride + col);
    }
  }

  static void transpose_sums(float* sums) {
    const auto square = [sums](int64_t i, int64_t j, F32(&v)[kLanes]) {
      for (int64_t k = 0; k < kLanes; ++k) v[k] = load(sums + (i + k) * kTiled + j);
      transpose(v);
    };
    for (int64_t i = 0; i < kTiled; i += kLanes)
      for (int64_t j = i; j < kTiled; j += kLanes) {
        F32 upper[kLanes], lower[kLanes];
        square(i, j, upper), square(j, i, lower);
        for (int64_t k = 0; k < kLanes; ++k) {
          store(sums + (j + k) * kTiled + i, upper[k]);
          store(sums + (i + k) * kTiled + j, lower[k]);
        }
      }
  }
};

/// out = a b + bias in bfloat16.
void matmul_by_tiles(const MatmulProblem& p) { TiledMatmul{p}.multiply_matrix(); }
