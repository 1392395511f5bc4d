// The blocked product: out[i, j] = sum_l a[i, l] * b[j, l], scaled by block inside and by line outside
// (numerics.md 7.4). The output is cut into macro-tiles, one task each; the contraction is never split between tasks,
// and every element adds its blocks in increasing order, so results depend neither on threads nor on the cut.
#pragma once

#include "quire/cpu/generic/elements/codes.inl.h"
#include "quire/cpu/generic/gemm/epilogue.inl.h"
#include "quire/cpu/generic/gemm/micro_tile.inl.h"
#include "quire/cpu/generic/gemm/panel_codes.inl.h"
#include "quire/cpu/generic/gemm/panel_scales.inl.h"

/// A regular cut of the output.
struct OutputCut {
  int64_t rows = 0, cols = 0;  ///< of a macro-tile; those at the end may be smaller
  int64_t across = 0;          ///< macro-tiles side by side
  int64_t count = 0;           ///< macro-tiles in all
};

/// Multiplications of codes that pay for another thread, which takes microseconds to begin and to wait for, and much
/// longer where other programs use its core.
constexpr int64_t kWorkOfThread = int64_t{1} << 18;

/// As few macro-tiles as the sizes above allow, but some per thread where there is enough work.
template <class MicroKernel>
OutputCut cut_output(int64_t rows, int64_t cols, int64_t contraction) {
  constexpr int64_t tile_cols = MicroKernel::kVectors * kLanes, min_rows = 8 * MicroKernel::kRows,
                    min_cols = 4 * tile_cols;
  static_assert(kMacroTileRows % MicroKernel::kRows == 0 && kMacroTileCols % tile_cols == 0 &&
                tile_cols % kLaneGroup == 0);
  // Decoding a column takes about as long as multiplying it by eight rows.
  const int64_t work = cols * contraction * (8 + rows) / 8;
  const int64_t wanted = std::min(2 * parallelism(), work / kWorkOfThread);
  // The fewest macro-tiles that the limits of their size allow.
  int64_t down = ceil_div(rows, kMacroTileRows), across = ceil_div(cols, kMacroTileCols);
  // Until there are as many as wanted, cut the side whose pieces are longer, if these can be halved.
  while (down * across < wanted) {
    const bool can_rows = rows >= 2 * min_rows * down, can_cols = cols >= 2 * min_cols * across;
    if (!can_rows && !can_cols) break;
    const bool split_rows = can_rows && (!can_cols || rows / down >= cols / across);
    ++(split_rows ? down : across);
  }
  // Macro-tiles of equal size, in whole micro-tiles. Rounding up may leave fewer of them than were asked for.
  OutputCut cut{round_up(ceil_div(rows, down), MicroKernel::kRows), round_up(ceil_div(cols, across), tile_cols)};
  cut.across = ceil_div(cols, cut.cols);
  cut.count = cut.across * ceil_div(rows, cut.rows);
  return cut;
}

/// How many of some lines are units. A line is a unit if its scales are all 1 in the inner product: it has none, or
/// they were folded into its codes. That is decided line by line, so that an element's bits do not depend on its
/// neighbours.
enum class UnitScales : uint8_t { none, some, all };

inline UnitScales unit_scales_of(const bool* unit_scales, int64_t count) {
  const int64_t found = std::count(unit_scales, unit_scales + count, true);
  return found == count ? UnitScales::all : found == 0 ? UnitScales::none : UnitScales::some;
}

/// The lines of one side of a macro-tile.
template <int64_t kLines>
struct MacroTileLines {
  bool unit_scale[kLines] = {};
  uint16_t folded[kLines / kLaneGroup] = {};  ///< of each group the units that have block scales, a bit each
  UnitScales in_tile[kLines] = {};

  /// `length` lines in tiles of `size`; those up to the end of the last group are as the last line.
  template <class MicroKernel>
  void find(const Operand& o, int64_t first, int64_t length, int64_t size) {
    // Which lines are units: the lines without block scales, and those whose scales are folded as they are packed.
    const bool scales = has_block_scales(o);
    if (scales && MicroKernel::kFolding == Folding::powers && may_fold(o)) {
      find_folded(o, first, length, unit_scale);
    } else {
      std::fill_n(unit_scale, length, !scales || MicroKernel::kFolding == Folding::all);
    }
    const int64_t padded = round_up(length, kLaneGroup);
    std::fill(unit_scale + length, unit_scale + padded, unit_scale[length - 1]);
    // For each micro-tile, whether all, some or none of its lines are units.
    for (int64_t i = 0; i < length; i += size)
      in_tile[i / size] = unit_scales_of(unit_scale + i, std::min(size, length - i));
    // A bit for each line whose scales are folded: packing takes a group of lines at a time.
    for (int64_t i = 0; scales && i < padded; ++i)
      folded[i / kLaneGroup] = static_cast<uint16_t>(folded[i / kLaneGroup] | unit_scale[i] << i % kLaneGroup);
  }
};

/// A macro-tile's tiles, and what the scales of their lines leave to do in the inner product.
template <class MicroKernel>
struct Tiles {
  static constexpr int64_t kCols = MicroKernel::kVectors * kLanes;
  int64_t height = 0, down = 0, across = 0;
  MacroTileLines<kMacroTileRows> rows;
  MacroTileLines<kMacroTileCols> cols;

  Tiles(const GemmProblem& p, const MacroTile& r)
      : height(tile_height<MicroKernel>(r.rows)), down(ceil_div(r.rows, height)), across(ceil_div(r.cols, kCols)) {
    rows.template find<MicroKernel>(p.a, r.row, r.rows, height);
    cols.template find<MicroKernel>(p.b, r.col, r.cols, kCols);
  }
  bool all_unit_scales() const {
    const auto all = [](const UnitScales* unit_scales, int64_t count) {
      return std::all_of(unit_scales, unit_scales + count, [](UnitScales u) { return u == UnitScales::all; });
    };
    return all(rows.in_tile, down) && all(cols.in_tile, across);
  }
};

/// Which lines of a tile are units.
struct UnitScaleLines {
  const bool* rows;
  const bool* cols;
};

/// Memory of one task: the thread's. It is always taken for the largest macro-tile, so that a thread allocates it once.
template <class MicroKernel>
struct TaskMemory {
  /// K-panels of packed rows that fit.
  static constexpr int64_t panels(int64_t rows) {
    return std::max<int64_t>(1, MicroKernel::kPackedRows / (round_up(rows, kLaneGroup) * MicroKernel::kRowLanes));
  }
  static constexpr int64_t kPackedLines = std::max(MicroKernel::kPackedRows / MicroKernel::kRowLanes, kMacroTileRows);
  static constexpr std::array<int64_t, 5> kFloats{kPackedLines * MicroKernel::kRowLanes, kPackedLines * kPanelBlocks,
                                                  Tiles<MicroKernel>::kCols * MicroKernel::kPanelLanes,
                                                  Tiles<MicroKernel>::kCols * kPanelBlocks,
                                                  kMacroTileRows * kMacroTileCols};
  static constexpr int64_t start(size_t part) {
    int64_t at = 0;
    for (size_t i = 0; i < part; ++i) at += round_up(kFloats[i], 16);
    return at;
  }

  TaskMemory(const OutputCut& cut, int64_t contraction)
      : rows(round_up(cut.rows, kLaneGroup)),
        depth(std::min(panels(cut.rows), std::max<int64_t>(1, ceil_div(contraction, kPanelDepth)))) {}
  float* part(size_t i) const { return static_cast<float*>(memory.get()) + start(i); }

  int64_t rows, depth;
  ThreadMemory memory{start(kFloats.size()) * 4};
  float *a = part(0), *a_scale = part(1);  ///< [depth][rows][...]
  float *b = part(2), *b_scale = part(3);
  float* sum = part(4);  ///< [cols / tile's cols][rows, whole tiles][tile's cols]
};

/// The task of one macro-tile.
template <class MicroKernel>
struct MacroKernel {
  const GemmProblem& p;
  const MacroTile& macro_tile;
  const TaskMemory<MicroKernel>& w;
  const Tiles<MicroKernel> tiles{p, macro_tile};
  const int64_t block = std::min(summed(p.a), summed(p.b));
  const bool scaled = !tiles.all_unit_scales();

  static int64_t summed(const Operand& o) {
    return std::min<int64_t>(block_length(o.spec, MicroKernel::kMaxBlock), MicroKernel::kMaxBlock);
  }
  KPanel panel(int64_t begin) const {
    const int64_t size = std::min(p.a.contraction - begin, kPanelDepth);
    return {begin, size, round_up(size, kLaneGroup), block};
  }

  void pack_rows(int64_t begin, int64_t depth) const {
    for (int64_t d = 0; d < depth; ++d)
      for (int64_t i = 0; i < macro_tile.rows; i += kLaneGroup) {
        const KPanel s = panel(begin + d * kPanelDepth);
        const unsigned folded = tiles.rows.folded[i / kLaneGroup];
        const int64_t at = d * w.rows + i;
        // Codes to lanes, times their scales where these are folded.
        MicroKernel::pack_rows(p.a, macro_tile.row + i, s, folded, w.a + at * MicroKernel::kRowLanes);
        if (!scaled) continue;
        // Scales for the inner product. A folded scale is in the lanes already, so it must not count again.
        float* const scales = w.a_scale + at * kPanelBlocks;
        decode_scales<true>(p.a, macro_tile.row + i, s, kPanelBlocks, scales);
        for (int64_t k = 0; folded && k < kLaneGroup; ++k)
          if (folded >> k & 1) std::fill_n(scales + k * kPanelBlocks, kPanelBlocks, 1.0f);
      }
  }

  void pack_scales(int64_t tile, const KPanel& s) const {
    if (!scaled) return;
    for (int64_t k = 0; k < tiles.kCols; k += kLaneGroup) {
      const unsigned folded = tiles.cols.folded[(tile * tiles.kCols + k) / kLaneGroup];
      float* const scales = w.b_scale + k;
      decode_scales<false>(p.b, macro_tile.col + tile * tiles.kCols + k, s, tiles.kCols, scales);
      for (int64_t b = 0; folded && b < s.blocks(); ++b)
        for (int64_t j = 0; j < kLaneGroup; ++j)
          if (folded >> j & 1) scales[b * tiles.kCols + j] = 1;
    }
  }

  /// Whether a tile's columns are decoded as they are multiplied.
  bool reads_codes(const KPanel& s) const {
    const int64_t rows = macro_tile.rows - (tiles.down - 1) * tiles.height;
    return p.b.spec.interleaved && MicroKernel::reads(p.b.spec, rows) && s.size % MicroKernel::kReadStep == 0;
  }

  /// Adds one K-panel to a column of tiles.
  void multiply_panel(int64_t tile, int64_t d, const KPanel& s) const {
    // w.b and w.b_scale hold one K-panel of one column of micro-tiles. The next panel overwrites them.
    pack_scales(tile, s);
    const PackedColumns<MicroKernel> packed{w.b};
    const int64_t col = tile * tiles.kCols;
    // If the codes can be read in place, the last micro-tile decodes them, and leaves packed lanes for those above it.
    bool last_is_done = false;
    if constexpr (MicroKernel::kReadsCodes)
      last_is_done = reads_codes(s) && multiply_last_micro_tile(tile, d, s, packed);
    // Otherwise pack all columns before the first micro-tile.
    for (int64_t k = col; !last_is_done && k < col + tiles.kCols; k += kLaneGroup)
      MicroKernel::pack_columns(p.b, macro_tile.col + k, s, tiles.cols.folded[k / kLaneGroup],
                                w.b + (k - col) * MicroKernel::kPanelLanes);
    // The micro-tiles that remain multiply packed lanes, which stay in the first-level cache.
    for (int64_t i = 0; i < tiles.down - last_is_done; ++i) multiply_micro_tile(tile, i, d, s, packed);
  }

  /// Adds one K-panel to the last tile of a column of them, which has the fewest rows, while the columns are decoded,
  /// and packs them if there are other tiles or the lanes want them packed. Returns false if the columns cannot be
  /// decoded so.
  bool multiply_last_micro_tile(int64_t tile, int64_t d, const KPanel& s,
                                const PackedColumns<MicroKernel>& packed) const {
    // Folded codes that are infinite or NaN come out as numbers, which is known only afterwards: keep the sums of
    // before.
    const int64_t col = tile * tiles.kCols, last = tiles.down - 1, row = last * tiles.height,
                  size = (macro_tile.rows - row) * tiles.kCols;
    float* const sum = w.sum + (tile * tiles.down * tiles.height + row) * tiles.kCols;
    alignas(64) float before[MicroKernel::kRows * tiles.kCols];
    if (MicroKernel::kFolding == Folding::powers) std::copy_n(sum, size, before);
    // Multiply, and pack what is decoded only if a micro-tile needs it packed.
    const auto body = [&]<class Codes>(const Codes& codes) {
      if constexpr (MicroKernel::kKeeping != Keeping::always)
        if (MicroKernel::kKeeping == Keeping::never || last == 0) return multiply_micro_tile(tile, last, d, s, codes);
      if constexpr (MicroKernel::kKeeping != Keeping::never)
        multiply_micro_tile(tile, last, d, s, KeptColumns<MicroKernel, Codes>{codes, packed});
    };
    // Undo the sums if the codes were decoded wrong. The caller then packs the columns and starts again.
    if (MicroKernel::with_codes(p.b, macro_tile.col + col, s, tiles.cols.folded + col / kLaneGroup, body)) return true;
    std::copy_n(before, size, sum);
    return false;
  }

  /// Adds one K-panel to the i-th tile of a column of them.
  template <class Columns>
  void multiply_micro_tile(int64_t tile, int64_t i, int64_t d, const KPanel& s, const Columns& columns) const {
    const KPanel unscaled{s.begin, s.size, s.padded, MicroKernel::kMaxBlock};
    // Where the packed rows of this micro-tile, their scales and its sums lie.
    const int64_t row = i * tiles.height, at = d * w.rows + row;
    const MicroTile t{std::min(macro_tile.rows - row, tiles.height), w.a + at * MicroKernel::kRowLanes,
                      w.a_scale + at * kPanelBlocks, w.b_scale,
                      w.sum + (tile * tiles.down * tiles.height + row) * tiles.kCols};
    const UnitScales rows = tiles.rows.in_tile[i], cols = tiles.cols.in_tile[tile];
    // Without scales a block is as long as the micro-kernel allows. A tile with both kinds of lines is multiplied both
    // ways, so that no element depends on its neighbours.
    if (rows == UnitScales::all && cols == UnitScales::all) {
      multiply_fewest_rows<MicroKernel, MicroKernel::kRows, false>(t, columns, unscaled);
    } else if (rows == UnitScales::none || cols == UnitScales::none) {
      multiply_fewest_rows<MicroKernel, MicroKernel::kRows, true>(t, columns, s);
    } else {
      multiply_mixed_micro_tile(t, columns, {tiles.rows.unit_scale + row, tiles.cols.unit_scale + tile * tiles.kCols},
                                s);
    }
  }

  /// A tile some of whose elements need scales: both ways, then each element takes its own.
  template <class Columns>
  static void multiply_mixed_micro_tile(const MicroTile& t, const Columns& columns, const UnitScaleLines& unit_scales,
                                        const KPanel& s) {
    constexpr int64_t cols = Tiles<MicroKernel>::kCols;
    // Both start from the same sums: `plain` is multiplied without scales, t.sum with them.
    alignas(64) float plain[MicroKernel::kRows * cols];
    std::copy_n(t.sum, t.rows * cols, plain);
    multiply_fewest_rows<MicroKernel, MicroKernel::kRows, false>({t.rows, t.a, t.a_scale, t.b_scale, plain}, columns,
                                                                 {s.begin, s.size, s.padded, MicroKernel::kMaxBlock});
    multiply_fewest_rows<MicroKernel, MicroKernel::kRows, true>(t, columns, s);
    // An element keeps the sum without scales if both its lines are units.
    for (int64_t i = 0; i < t.rows; ++i)
      for (int64_t j = 0; j < cols; ++j)
        if (unit_scales.rows[i] && unit_scales.cols[j]) t.sum[i * cols + j] = plain[i * cols + j];
  }

  void multiply_macro_tile() const {
    // The sums of the whole macro-tile stay in memory from the first K-panel to the last.
    const int64_t sums = tiles.down * tiles.height * tiles.across * tiles.kCols, k = p.a.contraction;
    std::memset(w.sum, 0, sizeof(float) * static_cast<size_t>(sums));
    for (int64_t begin = 0; begin < k; begin += w.depth * kPanelDepth) {
      // Pack the rows of as many K-panels as fit: they then serve every column of micro-tiles.
      const int64_t depth = std::min(w.depth, ceil_div(k - begin, kPanelDepth));
      pack_rows(begin, depth);
      // K-panels of a column in increasing order: the order of its sums is part of the contract.
      for (int64_t tile = 0; tile < tiles.across; ++tile)
        for (int64_t d = 0; d < depth; ++d) multiply_panel(tile, d, panel(begin + d * kPanelDepth));
    }
    // Sums to outputs: factors of lines, bias, rounding, addend.
    finish_macro_tile<MicroKernel>(p, macro_tile, w.sum);
  }
};

template <class MicroKernel>
void multiply_matrix(const GemmProblem& p) {
  if (p.a.outer == 0 || p.b.outer == 0) return;
  const OutputCut cut = cut_output<MicroKernel>(p.a.outer, p.b.outer, p.a.contraction);
  parallel_for(cut.count, 1, [&](int64_t begin, int64_t end) {
    [[maybe_unused]] const typename MicroKernel::Session session(p.a.outer);
    const TaskMemory<MicroKernel> w(cut, p.a.contraction);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / cut.across * cut.rows, col = i % cut.across * cut.cols;
      const MacroTile macro_tile{row, col, std::min(cut.rows, p.a.outer - row), std::min(cut.cols, p.b.outer - col)};
      MacroKernel<MicroKernel>{p, macro_tile, w}.multiply_macro_tile();
    }
  });
}

/// The product in lanes of a shape, or in tall ones where as many rows would take several of its tiles and decoding
/// takes so long that it had better be done once.
template <template <TileShape> class Lanes, TileShape kShape>
void multiply_matrix_of_shape(const GemmProblem& p) {
  const bool tall = p.a.outer > kShape.rows && p.a.outer <= kTallTile.rows && Lanes<kShape>::decodes_slowly(p.b);
  tall ? multiply_matrix<Lanes<kTallTile>>(p) : multiply_matrix<Lanes<kShape>>(p);
}
