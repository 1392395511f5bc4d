// Lanes of four int8: exact sums of 4-bit codes. An E2M1 value doubled is an integer of at most 12; columns carry 12
// more so that they are not negative, as the instruction wants it, and every sum starts at -12 times the sum of its row
// (numerics.md 0.20).
//
// A byte of a packed line holds two neighbours, so a lane is made of the low or of the high nibbles of four bytes: rows
// and columns agree on the order, and that is all a sum of products needs.
#pragma once

#include "quire/cpu/generic/elements/codes.inl.h"
#include "quire/cpu/generic/gemm/gemm.inl.h"
#include "quire/cpu/generic/gemm/micro_tile.inl.h"
#include "quire/cpu/generic/gemm/panel_codes.inl.h"
#include "quire/cpu/generic/gemm/quads.inl.h"
#include "quire/cpu/generic/vocabulary.inl.h"

template <class T>
struct Int8Types : VocabularyTypes<T> {
  using Sums = Products;
};
static_assert(HasInt8Words<Int8Types<void>>, "the vocabulary lacks a word of int8 lanes");

constexpr int kInt8Offset = 12;
constexpr TileShape kInt8Tile{kInt8Rows, kTileVectors};

/// Values of packed codes doubled plus an offset, by code.
constexpr auto int8_values(int offset) {
  std::array<uint8_t, 16> values{};
  for (int code = 0; code < 16; ++code)
    values[static_cast<size_t>(code)] =
        static_cast<uint8_t>(static_cast<int>(2 * quire::decode(kPackedFormat, code)) + offset);
  return values;
}
constexpr auto kInt8RowValues = int8_values(0), kInt8ColumnValues = int8_values(kInt8Offset);

template <TileShape kShape>
struct Int8MicroKernel : RegisterMicroKernel {
  using Vector = Bytes;
  static constexpr int kPerLane = 4;
  static constexpr int64_t kMaxBlock = 16;
  static constexpr int64_t kBlockLanes = kMaxBlock / kPerLane;
  static constexpr int64_t kPanelLanes = kPanelDepth / kPerLane;
  static constexpr int64_t kStep = 2 * kLanes * kPerLane;  ///< codes of a line that are packed at a time
  /// After a row's lanes come the starts of its blocks' sums.
  static constexpr int64_t kRowLanes = kPanelLanes + kPanelBlocks;
  static constexpr int kRows = kShape.rows, kVectors = kShape.vectors;
  static constexpr float kUnit = 0.25f;
  static constexpr Folding kFolding = Folding::none;

  static void pack_rows(const Operand& o, int64_t outer, const KPanel& panel, unsigned /*folded*/, float* out) {
    StagedCodes staged;
    const LineBytes lines = packed_along(o, outer, panel, staged);
    const Bytes table = repeat_table(kInt8RowValues.data()), offset = Bytes{} + kInt8Offset;
    pack_lines<Int8MicroKernel>(o, outer, out, [&](int64_t i, float* row) {
      for (int64_t l = 0; l < panel.rounded(kStep) / kPerLane; l += 2 * kLanes) {
        const uint8_t* from = lines.data + i * lines.stride + l * 2;
        __builtin_prefetch(from + kLinesAhead * lines.stride);
        // Two codes in each byte: low nibbles and high nibbles are lanes of their own, then in the order of columns.
        const Bytes codes = load_bytes(from);
        Bytes first = look_up(table, codes & 0xF), second = look_up(table, codes >> 4);
        interleave_lanes(first, second);
        store_bytes(row + l, first);
        store_bytes(row + l + kLanes, second);
        // The sums of each block start at -12 times the sum of its row, which takes the offset of columns out again.
        store_starts(total(dot(Products{}, offset, first)), row + kPanelLanes + l / kBlockLanes);
        store_starts(total(dot(Products{}, offset, second)), row + kPanelLanes + (l + kLanes) / kBlockLanes);
      }
    });
  }

  /// Minus the sums of each block's lanes.
  static void store_starts(I32 sums, float* out) {
    // A block is four lanes: add neighbours twice, so that each of the four holds the sum.
    const I32 pairs = sums + permuted(sums, [](int i) { return i ^ 1; });
    const I32 blocks = -(pairs + permuted(pairs, [](int i) { return i ^ 2; }));
    // Keep one of the four.
    const I32 starts = permuted(kept_start(blocks), [](int i) { return i * static_cast<int>(kBlockLanes) % kLanes; });
    std::memcpy(out, &starts, sizeof(float) * kLanes / kBlockLanes);
  }

  /// Lane i is lane from(i) of v.
  template <class From>
  static I32 permuted(I32 v, From from) {
    I32 order;
    for (int i = 0; i < kLanes; ++i) order[i] = from(i);
    return __builtin_shuffle(v, order);
  }

  static void pack_columns(const Operand& o, int64_t outer, const KPanel& panel, unsigned /*folded*/, float* out) {
    with_pairs_of(o, outer, panel, [&](const auto& pairs) { decode_columns(pairs, panel, out); });
  }

  template <class Source>
  static void decode_columns(const Source& pairs, const KPanel& panel, float* out) {
    const Bytes table = repeat_table(kInt8ColumnValues.data());
    for (int64_t from = 0; from < panel.rounded(kStep) / 2; from += 4 * Source::kStep) {
      // Each quad of bytes is two lanes of each line: low nibbles, then high ones, as in rows.
      U32 quads[Source::kStep][kQuadVectors];
      pairs.read(from, quads);
#pragma GCC unroll 4
      for (int q = 0; q < Source::kStep; ++q, out += 2 * kLaneGroup)
        for (int v = 0; v < kQuadVectors; ++v) {
          const Bytes codes = reinterpret_cast<Bytes>(quads[q][v]);
          store_bytes(out + v * kLanes, look_up(table, codes & 0xF));
          store_bytes(out + kLaneGroup + v * kLanes, look_up(table, codes >> 4));
        }
    }
  }

  using BlockOfColumns = Bytes[kBlockLanes][kVectors];
  using BlockOfVector = Bytes[kBlockLanes];

  static void read_vector(const PackedColumns<Int8MicroKernel>& columns, int64_t block, int v, BlockOfVector& to) {
#pragma GCC unroll 4
    for (int q = 0; q < kBlockLanes; ++q) to[q] = load_bytes(columns.at(block * kBlockLanes + q, v));
  }
  template <class Codes>
  static void read_vector(const KeptColumns<Int8MicroKernel, Codes>& columns, int64_t block, int v, BlockOfVector& to) {
    read_vector(columns.codes, block, v, to);
#pragma GCC unroll 4
    for (int q = 0; q < kBlockLanes; ++q) store_bytes(columns.kept.at(block * kBlockLanes + q, v), to[q]);
  }

  /// Columns decoded as they are multiplied.
  struct Int8Codes {
    StoredColumns<Int8MicroKernel> stored;
    Bytes table;
  };
  static void read_vector(const Int8Codes& columns, int64_t block, int v, BlockOfVector& to) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const Bytes codes = load_bytes(columns.stored.at(2 * block + half, v));
      to[2 * half] = look_up(columns.table, codes & 0xF);
      to[2 * half + 1] = look_up(columns.table, codes >> 4);
    }
  }

  template <class Columns>
  static void read_block(const Columns& columns, int64_t block, BlockOfColumns& to) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      BlockOfVector lanes;
      read_vector(columns, block, v, lanes);
#pragma GCC unroll 4
      for (int q = 0; q < kBlockLanes; ++q) to[q][v] = lanes[q];
    }
  }

  static bool reads(const QuantSpec& /*spec*/, int64_t /*rows*/) { return true; }
  static bool decodes_slowly(const Operand& /*columns*/) { return true; }

  template <class Body>
  static bool with_codes(const Operand& o, int64_t col, const KPanel& panel, const uint16_t* /*folded*/,
                         const Body& body) {
    body(Int8Codes{{o, col, panel}, repeat_table(kInt8ColumnValues.data())});
    return true;
  }

  /// Every block of 16 is summed in integers, then scaled and added. Both operands have block scales.
  template <int Rows, bool Scaled, class Columns>
  [[gnu::noinline]] static void multiply_rows(const MicroTile& tile, const Columns& columns, const KPanel& panel) {
    if constexpr (Rows == 1) {
      add_row(tile, columns, panel);
    } else if constexpr (Rows <= kInt8RegisterRows) {
      add_in_registers<Rows>(tile, columns, panel);
    } else {
      add_in_memory(tile, columns, panel);
    }
  }

 private:
  /// What the products of a block come to, of one row at `a` with a vector of columns each.
  static void sum_block(const float* a, const float* start, const BlockOfColumns& columns, I32 (&to)[kVectors]) {
    // Start at what takes the offset out, so that the sums are those of the signed values.
    Products products[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) products[v] = reinterpret_cast<Products>(broadcast_bytes(start));
#pragma GCC unroll 4
    for (int q = 0; q < kBlockLanes; ++q) {
      const Bytes element = broadcast_bytes(a + q);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) products[v] = dot(products[v], columns[q][v], element);
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) to[v] = total(products[v]);
  }

  /// One row: a vector of columns after the other, whose lanes then need few registers.
  template <class Columns>
  [[gnu::noinline]] static void add_row(const MicroTile& tile, const Columns& packed, const KPanel& panel) {
    const Columns from = packed;
    constexpr int kCols = kVectors * kLanes;
    // Sums stay in registers over all blocks of the K-panel.
    F32 sum[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sum[v] = load(tile.sum + v * kLanes);
    const float* a = tile.a;
    const float* scale = tile.b_scale;
    const int64_t blocks = panel.blocks();
    for (int64_t block = 0; block < blocks; ++block, a += kBlockLanes, scale += kCols) {
      // The row's part of the block: its start, scale and lanes, broadcast once for all columns.
      const auto start = reinterpret_cast<Products>(broadcast_bytes(tile.a + kPanelLanes + block));
      const F32 row_scale = broadcast(tile.a_scale[block]);
      Bytes element[kBlockLanes];
#pragma GCC unroll 4
      for (int q = 0; q < kBlockLanes; ++q) element[q] = broadcast_bytes(a + q);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        // A vector of columns: exact integer sums, then scaled and added in float32.
        BlockOfVector columns;
        read_vector(from, block, v, columns);
        Products products = start;
#pragma GCC unroll 4
        for (int q = 0; q < kBlockLanes; ++q) products = dot(products, columns[q], element[q]);
        sum[v] =
            multiply_add(__builtin_convertvector(total(products), F32), row_scale * load(scale + v * kLanes), sum[v]);
      }
    }
    // Back to memory, for the next K-panel.
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(tile.sum + v * kLanes, sum[v]);
  }

  /// Any number of rows; a block's columns stay in registers for all of them.
  template <class Columns>
  [[gnu::noinline]] static void add_in_memory(const MicroTile& tile, const Columns& packed, const KPanel& panel) {
    const Columns from = packed;
    constexpr int kCols = kVectors * kLanes;
    const int64_t blocks = panel.blocks(), rows = tile.rows;
    for (int64_t block = 0; block < blocks; ++block) {
      // The block's columns and their scales: in registers while all rows pass.
      BlockOfColumns columns;
      read_block(from, block, columns);
      F32 scale[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) scale[v] = load(tile.b_scale + block * kCols + v * kLanes);
      const float* row = tile.a;
      const float* row_scale = tile.a_scale + block;
      float* sum = tile.sum;
      for (int64_t r = 0; r < rows; ++r, row += kRowLanes, row_scale += kPanelBlocks, sum += kCols) {
        // Sums are too many for registers: each is read and written once a block.
        I32 products[kVectors];
        sum_block(row + block * kBlockLanes, row + kPanelLanes + block, columns, products);
        const F32 factor = broadcast(*row_scale);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v)
          store(sum + v * kLanes,
                multiply_add(__builtin_convertvector(products[v], F32), factor * scale[v], load(sum + v * kLanes)));
      }
    }
  }

  template <int Rows, class Columns>
  [[gnu::noinline]] static void add_in_registers(const MicroTile& tile, const Columns& packed, const KPanel& panel) {
    const Columns from = packed;
    constexpr int kCols = kVectors * kLanes;
    // Sums stay in registers over all blocks; columns of a block are decoded once for all rows.
    F32 sum[Rows][kVectors];
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[r][v] = load(tile.sum + r * kCols + v * kLanes);
    const float* a = tile.a;
    const int64_t blocks = panel.blocks();
    for (int64_t block = 0; block < blocks; ++block, a += kBlockLanes) {
      BlockOfColumns columns;
      read_block(from, block, columns);
      F32 scale[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) scale[v] = load(tile.b_scale + block * kCols + v * kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) {
        // Exact integer sums of the block, then scaled and added in float32: the same steps as in add_in_memory(), so
        // the same bits.
        I32 products[kVectors];
        sum_block(a + r * kRowLanes, tile.a + r * kRowLanes + kPanelLanes + block, columns, products);
        const F32 row_scale = broadcast(tile.a_scale[r * kPanelBlocks + block]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v)
          sum[r][v] = multiply_add(__builtin_convertvector(products[v], F32), row_scale * scale[v], sum[r][v]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) store(tile.sum + r * kCols + v * kLanes, sum[r][v]);
  }
};

/// One row in a tile of more columns, for which its lanes are loaded once.
template <void (*MultiplyMatrix)(const GemmProblem&)>
void multiply_matrix_of_any_height(const GemmProblem& p) {
  constexpr TileShape kFlatTile{1, kTileVectors};
  p.a.outer == 1 ? multiply_matrix<Int8MicroKernel<kFlatTile>>(p) : MultiplyMatrix(p);
}
