// The blocked product: out[i, j] = sum_l a[i, l] * b[j, l], scaled by block inside and by line outside
// (numerics.md 7.4). The output is cut into regions, one task each; the contraction is never split between tasks, and
// every element adds its blocks in increasing order, so results depend neither on threads nor on the cut.
#pragma once

#include "quire/cpu/generic/elements/codes.inl.h"
#include "quire/cpu/generic/gemm/epilogue.inl.h"
#include "quire/cpu/generic/gemm/microkernel.inl.h"
#include "quire/cpu/generic/gemm/slab_codes.inl.h"
#include "quire/cpu/generic/gemm/slab_scales.inl.h"

/// A regular cut of the output.
struct Cut {
  int64_t rows = 0, cols = 0;  ///< of a region; those at the end may be smaller
  int64_t across = 0;          ///< regions side by side
  int64_t count = 0;           ///< regions in all
};

/// As few regions as the sizes above allow, but some per thread where there is enough work.
template <class L>
Cut cut_output(int64_t rows, int64_t cols) {
  constexpr int64_t tile_cols = L::kVectors * kLanes, min_rows = 8 * L::kRows, min_cols = 4 * tile_cols;
  static_assert(kRegionRows % L::kRows == 0 && kRegionCols % tile_cols == 0 && tile_cols % kGroup == 0);
  const int64_t wanted = 2 * parallelism();
  int64_t down = ceil_div(rows, kRegionRows), across = ceil_div(cols, kRegionCols);
  while (down * across < wanted) {
    const bool can_rows = rows >= 2 * min_rows * down, can_cols = cols >= 2 * min_cols * across;
    if (!can_rows && !can_cols) break;
    const bool split_rows = can_rows && (!can_cols || rows / down >= cols / across);
    ++(split_rows ? down : across);
  }
  Cut cut{round_up(ceil_div(rows, down), L::kRows), round_up(ceil_div(cols, across), tile_cols)};
  cut.across = ceil_div(cols, cut.cols);
  cut.count = cut.across * ceil_div(rows, cut.rows);
  return cut;
}

/// How many of some lines are units. A line is a unit if its scales are all 1 in the inner product: it has none, or
/// they were folded into its codes. That is decided line by line, so that an element's bits do not depend on its
/// neighbours.
enum class Units : uint8_t { none, some, all };

inline Units units_of(const bool* units, int64_t count) {
  const int64_t found = std::count(units, units + count, true);
  return found == count ? Units::all : found == 0 ? Units::none : Units::some;
}

/// The lines of one side of a region.
template <int64_t kLines>
struct Lines {
  bool unit[kLines] = {};
  uint16_t folded[kLines / kGroup] = {};  ///< of each group the units that have block scales, a bit each
  Units in_tile[kLines] = {};

  /// `length` lines in tiles of `size`; those up to the end of the last group are as the last line.
  template <class L>
  void find(const Operand& o, int64_t first, int64_t length, int64_t size) {
    const bool scales = has_block_scales(o);
    if (scales && L::kFolding == Folding::powers && may_fold(o)) {
      find_folded(o, first, length, unit);
    } else {
      std::fill_n(unit, length, !scales || L::kFolding == Folding::all);
    }
    const int64_t padded = round_up(length, kGroup);
    std::fill(unit + length, unit + padded, unit[length - 1]);
    for (int64_t i = 0; i < length; i += size) in_tile[i / size] = units_of(unit + i, std::min(size, length - i));
    for (int64_t i = 0; scales && i < padded; ++i)
      folded[i / kGroup] = static_cast<uint16_t>(folded[i / kGroup] | unit[i] << i % kGroup);
  }
};

/// A region's tiles, and what the scales of their lines leave to do in the inner product.
template <class L>
struct Tiles {
  static constexpr int64_t kCols = L::kVectors * kLanes;
  int64_t height = 0, down = 0, across = 0;
  Lines<kRegionRows> rows;
  Lines<kRegionCols> cols;

  Tiles(const GemmProblem& p, const Region& r)
      : height(tile_height<L>(r.rows)), down(ceil_div(r.rows, height)), across(ceil_div(r.cols, kCols)) {
    rows.template find<L>(p.a, r.row, r.rows, height);
    cols.template find<L>(p.b, r.col, r.cols, kCols);
  }
  bool all_units() const {
    const auto all = [](const Units* units, int64_t count) {
      return std::all_of(units, units + count, [](Units u) { return u == Units::all; });
    };
    return all(rows.in_tile, down) && all(cols.in_tile, across);
  }
};

/// Which lines of a tile are units.
struct UnitLines {
  const bool* rows;
  const bool* cols;
};

/// Memory of one task: the thread's. It is always taken for the largest region, so that a thread allocates it once.
template <class L>
struct Workspace {
  /// Slabs of packed rows that fit.
  static constexpr int64_t slabs(int64_t rows) {
    return std::max<int64_t>(1, L::kPackedRows / (round_up(rows, kGroup) * L::kRowLanes));
  }
  static constexpr int64_t kPackedLines = std::max(L::kPackedRows / L::kRowLanes, kRegionRows);
  static constexpr std::array<int64_t, 5> kFloats{kPackedLines * L::kRowLanes, kPackedLines * kSlabBlocks,
                                                  Tiles<L>::kCols * L::kSlabLanes, Tiles<L>::kCols * kSlabBlocks,
                                                  kRegionRows * kRegionCols};
  static constexpr int64_t start(size_t panel) {
    int64_t at = 0;
    for (size_t i = 0; i < panel; ++i) at += round_up(kFloats[i], 16);
    return at;
  }

  Workspace(const Cut& cut, int64_t contraction)
      : rows(round_up(cut.rows, kGroup)),
        depth(std::min(slabs(cut.rows), std::max<int64_t>(1, ceil_div(contraction, kSlab)))) {}
  float* panel(size_t i) const { return static_cast<float*>(memory.get()) + start(i); }

  int64_t rows, depth;
  ThreadMemory memory{start(kFloats.size()) * 4};
  float *a = panel(0), *a_scale = panel(1);  ///< [depth][rows][...]
  float *b = panel(2), *b_scale = panel(3);
  float* sum = panel(4);  ///< [cols / tile's cols][rows, whole tiles][tile's cols]
};

/// The task of one region.
template <class L>
struct RegionProduct {
  const GemmProblem& p;
  const Region& region;
  const Workspace<L>& w;
  const Tiles<L> tiles{p, region};
  const int64_t block = std::min(summed(p.a), summed(p.b));
  const bool scaled = !tiles.all_units();

  static int64_t summed(const Operand& o) {
    return std::min<int64_t>(block_length(o.spec, L::kMaxBlock), L::kMaxBlock);
  }
  Slab slab(int64_t begin) const {
    const int64_t size = std::min(p.a.contraction - begin, kSlab);
    return {begin, size, round_up(size, kGroup), block};
  }

  void pack_rows(int64_t begin, int64_t depth) const {
    for (int64_t d = 0; d < depth; ++d)
      for (int64_t i = 0; i < region.rows; i += kGroup) {
        const Slab s = slab(begin + d * kSlab);
        const unsigned folded = tiles.rows.folded[i / kGroup];
        const int64_t at = d * w.rows + i;
        L::pack_rows(p.a, region.row + i, s, folded, w.a + at * L::kRowLanes);
        if (!scaled) continue;
        float* const scales = w.a_scale + at * kSlabBlocks;
        decode_scales<true>(p.a, region.row + i, s, kSlabBlocks, scales);
        for (int64_t k = 0; folded && k < kGroup; ++k)
          if (folded >> k & 1) std::fill_n(scales + k * kSlabBlocks, kSlabBlocks, 1.0f);
      }
  }

  void pack_scales(int64_t tile, const Slab& s) const {
    if (!scaled) return;
    for (int64_t k = 0; k < tiles.kCols; k += kGroup) {
      const unsigned folded = tiles.cols.folded[(tile * tiles.kCols + k) / kGroup];
      float* const scales = w.b_scale + k;
      decode_scales<false>(p.b, region.col + tile * tiles.kCols + k, s, tiles.kCols, scales);
      for (int64_t b = 0; folded && b < s.blocks(); ++b)
        for (int64_t j = 0; j < kGroup; ++j)
          if (folded >> j & 1) scales[b * tiles.kCols + j] = 1;
    }
  }

  /// Whether a tile's columns are decoded as they are multiplied.
  bool reads_codes(const Slab& s) const {
    return p.b.spec.interleaved && L::reads(p.b.spec) && s.size % L::kReadStep == 0;
  }

  /// Adds one slab to a column of tiles.
  void add_slab(int64_t tile, int64_t d, const Slab& s) const {
    pack_scales(tile, s);
    const PackedColumns<L> packed{w.b};
    const int64_t col = tile * tiles.kCols;
    int64_t i = 0;
    if constexpr (L::kReadsCodes)
      if (reads_codes(s)) i = multiply_codes(tile, d, s, packed);
    for (int64_t k = col; i == 0 && k < col + tiles.kCols; k += kGroup)
      L::pack_columns(p.b, region.col + k, s, tiles.cols.folded[k / kGroup], w.b + (k - col) * L::kSlabLanes);
    for (; i < tiles.down; ++i) multiply(tile, i, d, s, packed);
  }

  /// Adds one slab to the first tile of a column of them while the columns are decoded, and packs them if other tiles
  /// follow or the lanes want them packed. Returns how many tiles are done: one, or none if the columns cannot be
  /// decoded so.
  int64_t multiply_codes(int64_t tile, int64_t d, const Slab& s, const PackedColumns<L>& packed) const {
    const int64_t col = tile * tiles.kCols, size = std::min(tiles.height, region.rows) * tiles.kCols;
    float* const sum = w.sum + tile * tiles.down * tiles.height * tiles.kCols;
    alignas(64) float before[L::kRows * tiles.kCols];
    if (L::kFolding == Folding::powers) std::copy_n(sum, size, before);
    const auto body = [&]<class Codes>(const Codes& codes) {
      if constexpr (!L::kKeepsCodes)
        if (tiles.down == 1) return multiply(tile, 0, d, s, codes);
      multiply(tile, 0, d, s, KeptColumns<L, Codes>{codes, packed});
    };
    if (L::with_codes(p.b, region.col + col, s, tiles.cols.folded + col / kGroup, body)) return 1;
    std::copy_n(before, size, sum);
    return 0;
  }

  /// Adds one slab to the i-th tile of a column of them.
  template <class Columns>
  void multiply(int64_t tile, int64_t i, int64_t d, const Slab& s, const Columns& columns) const {
    const Slab unscaled{s.begin, s.size, s.padded, L::kMaxBlock};
    const int64_t row = i * tiles.height, at = d * w.rows + row;
    const RegisterTile t{std::min(region.rows - row, tiles.height), w.a + at * L::kRowLanes,
                         w.a_scale + at * kSlabBlocks, w.b_scale,
                         w.sum + (tile * tiles.down * tiles.height + row) * tiles.kCols};
    const Units rows = tiles.rows.in_tile[i], cols = tiles.cols.in_tile[tile];
    if (rows == Units::all && cols == Units::all) {
      multiply_rows<L, L::kRows, false>(t, columns, unscaled);
    } else if (rows == Units::none || cols == Units::none) {
      multiply_rows<L, L::kRows, true>(t, columns, s);
    } else {
      multiply_mixed(t, columns, {tiles.rows.unit + row, tiles.cols.unit + tile * tiles.kCols}, s);
    }
  }

  /// A tile some of whose elements need scales: both ways, then each element takes its own.
  template <class Columns>
  static void multiply_mixed(const RegisterTile& t, const Columns& columns, const UnitLines& units, const Slab& s) {
    constexpr int64_t cols = Tiles<L>::kCols;
    alignas(64) float plain[L::kRows * cols];
    std::copy_n(t.sum, t.rows * cols, plain);
    multiply_rows<L, L::kRows, false>({t.rows, t.a, t.a_scale, t.b_scale, plain}, columns,
                                      {s.begin, s.size, s.padded, L::kMaxBlock});
    multiply_rows<L, L::kRows, true>(t, columns, s);
    for (int64_t i = 0; i < t.rows; ++i)
      for (int64_t j = 0; j < cols; ++j)
        if (units.rows[i] && units.cols[j]) t.sum[i * cols + j] = plain[i * cols + j];
  }

  void run() const {
    const int64_t sums = tiles.down * tiles.height * tiles.across * tiles.kCols, k = p.a.contraction;
    std::memset(w.sum, 0, sizeof(float) * static_cast<size_t>(sums));
    for (int64_t begin = 0; begin < k; begin += w.depth * kSlab) {
      const int64_t depth = std::min(w.depth, ceil_div(k - begin, kSlab));
      pack_rows(begin, depth);
      for (int64_t tile = 0; tile < tiles.across; ++tile)
        for (int64_t d = 0; d < depth; ++d) add_slab(tile, d, slab(begin + d * kSlab));
    }
    finish_region<L>(p, region, w.sum);
  }
};

template <class L>
void multiply(const GemmProblem& p) {
  if (p.a.outer == 0 || p.b.outer == 0) return;
  const Cut cut = cut_output<L>(p.a.outer, p.b.outer);
  parallel_for(cut.count, 1, [&](int64_t begin, int64_t end) {
    [[maybe_unused]] const typename L::Session session(p.a.outer);
    const Workspace<L> w(cut, p.a.contraction);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / cut.across * cut.rows, col = i % cut.across * cut.cols;
      const Region region{row, col, std::min(cut.rows, p.a.outer - row), std::min(cut.cols, p.b.outer - col)};
      RegionProduct<L>{p, region, w}.run();
    }
  });
}

/// The product in lanes of a shape, or in tall ones where as many rows would take several of its tiles and decoding
/// takes so long that it had better be done once.
template <template <TileShape> class Lanes, TileShape kShape>
void multiply_shaped(const GemmProblem& p) {
  const bool tall = p.a.outer > kShape.rows && p.a.outer <= kTallTile.rows && Lanes<kShape>::decodes_slowly(p.b);
  tall ? multiply<Lanes<kTallTile>>(p) : multiply<Lanes<kShape>>(p);
}
