// The blocked product: out[i, j] = sum_l a[i, l] * b[j, l], scaled by block inside and by line outside
// (numerics.md 7.4). The output is cut into regions, one task each; the contraction is never split between tasks, and
// every element adds its blocks in increasing order, so results depend neither on threads nor on the cut.

/// Floats of packed rows that are kept at a time: few rows are packed once for all columns.
constexpr int64_t kPackedRows = int64_t{1} << 16;

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
  static const int64_t wanted = 2 * std::max<int64_t>(1, std::thread::hardware_concurrency());
  int64_t down = ceil_div(rows, kRegionRows), across = ceil_div(cols, kRegionCols);
  while (down * across < wanted) {
    const bool can_rows = rows >= 2 * min_rows * down, can_cols = cols >= 2 * min_cols * across;
    if (!can_rows && !can_cols) break;
    const bool split_rows = can_rows && (!can_cols || rows / down >= cols / across);
    (split_rows ? down : across) *= 2;
  }
  Cut cut{round_up(ceil_div(rows, down), L::kRows), round_up(ceil_div(cols, across), tile_cols)};
  cut.across = ceil_div(cols, cut.cols);
  cut.count = cut.across * ceil_div(rows, cut.rows);
  return cut;
}

/// A region's tiles, and what their scales leave to do in the inner product. A line is a unit if its scales are all 1
/// there: it has none, or they were folded into its codes. That is decided line by line, so that an element's bits do
/// not depend on its neighbours.
template <class L>
struct Tiles {
  static constexpr int64_t kRows = L::kRows, kCols = L::kVectors * kLanes;
  int64_t down = 0, across = 0;
  bool unit_rows[kRegionRows] = {}, unit_cols[kRegionCols] = {};

  Tiles(const GemmProblem& p, const Region& r) : down(ceil_div(r.rows, kRows)), across(ceil_div(r.cols, kCols)) {
    for (int64_t i = 0; i < r.rows; ++i) unit_rows[i] = is_unit(p.a, r.row + i);
    for (int64_t j = 0; j < r.cols; ++j) unit_cols[j] = is_unit(p.b, r.col + j);
    std::fill(unit_cols + r.cols, unit_cols + across * kCols, r.cols > 0 && unit_cols[r.cols - 1]);
  }
  static bool is_unit(const Operand& o, int64_t outer) {
    return !has_block_scales(o) || (L::kFolds && can_fold(o, outer));
  }
  static unsigned folded_lines(const Operand& o, const bool* units) {
    unsigned bits = 0;
    for (int64_t i = 0; i < kGroup && has_block_scales(o); ++i) bits |= unsigned{units[i]} << i;
    return bits;
  }
};

inline bool all_units(const bool* units, int64_t count) {
  return std::all_of(units, units + count, [](bool unit) { return unit; });
}
inline bool no_units(const bool* units, int64_t count) {
  return std::none_of(units, units + count, [](bool unit) { return unit; });
}

/// Memory of one task.
template <class L>
struct Workspace {
  /// Slabs of packed rows that fit.
  static int64_t slabs(int64_t rows) {
    return std::max<int64_t>(1, kPackedRows / (round_up(rows, kGroup) * L::kRowLanes));
  }
  Workspace(const Cut& cut, int64_t contraction)
      : rows(round_up(cut.rows, kGroup)),
        depth(std::min(slabs(cut.rows), std::max<int64_t>(1, ceil_div(contraction, kSlab)))),
        a(depth * rows * L::kRowLanes),
        a_scale(depth * rows * kSlabBlocks),
        b(Tiles<L>::kCols * L::kSlabLanes),
        b_scale(Tiles<L>::kCols * kSlabBlocks),
        sum(cut.rows * cut.cols) {}
  int64_t rows, depth;
  Scratch a, a_scale;  ///< [depth][rows][...]
  Scratch b, b_scale;
  Scratch sum;  ///< [cols / tile's cols][rows / tile's rows][tile's rows][tile's cols]
};

/// The task of one region.
template <class L>
struct RegionProduct {
  const GemmProblem& p;
  const Region& region;
  const Workspace<L>& w;
  const Tiles<L> tiles{p, region};
  const int64_t block = std::min(summed(p.a), summed(p.b));
  const bool scaled = !all_units(tiles.unit_rows, region.rows) || !all_units(tiles.unit_cols, region.cols);

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
        const unsigned folded = tiles.folded_lines(p.a, tiles.unit_rows + i);
        const int64_t at = d * w.rows + i;
        L::pack_rows(p.a, region.row + i, s, folded, w.a.get() + at * L::kRowLanes);
        if (!scaled) continue;
        float* const scales = w.a_scale.get() + at * kSlabBlocks;
        decode_scales<true>(p.a, region.row + i, s, kSlabBlocks, scales);
        for (int64_t k = 0; folded && k < kGroup; ++k)
          if (folded >> k & 1) std::fill_n(scales + k * kSlabBlocks, kSlabBlocks, 1.0f);
      }
  }

  void pack_columns(int64_t tile, const Slab& s) const {
    const bool* units = tiles.unit_cols + tile * tiles.kCols;
    for (int64_t k = 0; k < tiles.kCols; k += kGroup) {
      const int64_t col = region.col + tile * tiles.kCols + k;
      const unsigned folded = tiles.folded_lines(p.b, units + k);
      L::pack_columns(p.b, col, s, folded, w.b.get() + k * L::kSlabLanes);
      if (!scaled) continue;
      float* const scales = w.b_scale.get() + k;
      decode_scales<false>(p.b, col, s, tiles.kCols, scales);
      for (int64_t b = 0; folded && b < s.blocks(); ++b)
        for (int64_t j = 0; j < kGroup; ++j)
          if (folded >> j & 1) scales[b * tiles.kCols + j] = 1;
    }
  }

  /// Adds one slab to a column of tiles.
  void multiply(int64_t tile, int64_t d, const Slab& s) const {
    const Slab unscaled{s.begin, s.size, s.padded, L::kMaxBlock};
    const bool* cols = tiles.unit_cols + tile * tiles.kCols;
    float* sum = w.sum.get() + tile * tiles.down * tiles.kRows * tiles.kCols;
    for (int64_t i = 0; i < tiles.down; ++i, sum += tiles.kRows * tiles.kCols) {
      const int64_t at = d * w.rows + i * tiles.kRows;
      const RegisterTile t{w.a.get() + at * L::kRowLanes, w.a_scale.get() + at * kSlabBlocks, w.b.get(),
                           w.b_scale.get(), sum};
      const int64_t count = std::min<int64_t>(region.rows - i * tiles.kRows, tiles.kRows);
      const bool* rows = tiles.unit_rows + i * tiles.kRows;
      if (all_units(rows, count) && all_units(cols, tiles.kCols)) {
        multiply_rows<L, L::kRows, false>(t, unscaled, count);
      } else if (no_units(rows, count) || no_units(cols, tiles.kCols)) {
        multiply_rows<L, L::kRows, true>(t, s, count);
      } else {
        multiply_mixed(t, rows, cols, s, count);
      }
    }
  }

  /// A tile some of whose elements need scales: both ways, then each element takes its own.
  static void multiply_mixed(const RegisterTile& t, const bool* unit_rows, const bool* unit_cols, const Slab& s,
                             int64_t count) {
    constexpr int64_t cols = Tiles<L>::kCols, size = Tiles<L>::kRows * cols;
    alignas(64) float plain[size];
    std::copy_n(t.sum, size, plain);
    multiply_rows<L, L::kRows, false>({t.a, t.a_scale, t.b, t.b_scale, plain},
                                      {s.begin, s.size, s.padded, L::kMaxBlock}, count);
    multiply_rows<L, L::kRows, true>(t, s, count);
    for (int64_t i = 0; i < count; ++i)
      for (int64_t j = 0; j < cols; ++j)
        if (unit_rows[i] && unit_cols[j]) t.sum[i * cols + j] = plain[i * cols + j];
  }

  void run() const {
    const int64_t sums = tiles.down * tiles.kRows * tiles.across * tiles.kCols, k = p.a.contraction;
    std::memset(w.sum.get(), 0, sizeof(float) * static_cast<size_t>(sums));
    for (int64_t begin = 0; begin < k; begin += w.depth * kSlab) {
      const int64_t depth = std::min(w.depth, ceil_div(k - begin, kSlab));
      pack_rows(begin, depth);
      for (int64_t tile = 0; tile < tiles.across; ++tile)
        for (int64_t d = 0; d < depth; ++d) {
          const Slab s = slab(begin + d * kSlab);
          pack_columns(tile, s);
          multiply(tile, d, s);
        }
    }
    finish_region<L>(p, region, w.sum.get());
  }
};

template <class L>
void multiply(const GemmProblem& p) {
  if (p.a.outer == 0 || p.b.outer == 0) return;
  const Cut cut = cut_output<L>(p.a.outer, p.b.outer);
  parallel_for(cut.count, 1, [&](int64_t begin, int64_t end) {
    [[maybe_unused]] const typename L::Session session;
    const Workspace<L> w(cut, p.a.contraction);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / cut.across * cut.rows, col = i % cut.across * cut.cols;
      const Region region{row, col, std::min(cut.rows, p.a.outer - row), std::min(cut.cols, p.b.outer - col)};
      RegionProduct<L>{p, region, w}.run();
    }
  });
}
