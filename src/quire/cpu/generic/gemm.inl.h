// The blocked product: out[i, j] = sum_l a[i, l] * b[j, l], scaled by block inside and by line outside
// (numerics.md 7.4). The output is cut into regions, one task each; the contraction is never split between tasks, and
// every element adds its blocks in increasing order, so results depend neither on threads nor on the cut.

/// Region of the output that one task computes: at most these rows (decoded rows stay in the second-level cache) and
/// columns (each decoded row serves this many).
constexpr int64_t kRegionRows = 384;
constexpr int64_t kRegionCols = 512;
/// Most positions along the contraction whose codes are summed before anything else (numerics.md 0.20).
constexpr int64_t kMaxBlock = 128;
static_assert(kRegionRows % kTileRows == 0 && kRegionCols % kTileCols == 0);

/// A regular cut of the output.
struct Cut {
  int64_t rows = 0, cols = 0;  ///< of a region; those at the end may be smaller
  int64_t across = 0;          ///< regions side by side
  int64_t count = 0;           ///< regions in all
};

/// As few regions as the sizes above allow, but some per thread where there is enough work.
inline Cut cut_output(int64_t rows, int64_t cols) {
  constexpr int64_t min_rows = 8 * kTileRows, min_cols = 4 * kTileCols;
  static const int64_t wanted = 2 * std::max<int64_t>(1, std::thread::hardware_concurrency());
  int64_t down = ceil_div(rows, kRegionRows), across = ceil_div(cols, kRegionCols);
  while (down * across < wanted) {
    const bool can_rows = rows >= 2 * min_rows * down, can_cols = cols >= 2 * min_cols * across;
    if (!can_rows && !can_cols) break;
    const bool split_rows = can_rows && (!can_cols || rows / down >= cols / across);
    (split_rows ? down : across) *= 2;
  }
  Cut cut{round_up(ceil_div(rows, down), kTileRows), round_up(ceil_div(cols, across), kTileCols)};
  cut.across = ceil_div(cols, cut.cols);
  cut.count = cut.across * ceil_div(rows, cut.rows);
  return cut;
}

/// Memory of one task.
struct Workspace {
  explicit Workspace(const Cut& cut)
      : a(round_up(cut.rows, kGroup) * kSlab),
        a_scale(cut.rows * kSlabBlocks),
        b(kTileCols * kSlab),
        b_scale(kTileCols * kSlabBlocks),
        sum(cut.rows * cut.cols) {}
  Scratch a, a_scale, b, b_scale;
  Scratch sum;  ///< [cols / kTileCols][rows / kTileRows][kTileRows][kTileCols]
};

struct Region {
  int64_t row = 0, col = 0, rows = 0, cols = 0;
  int64_t tile_rows() const { return ceil_div(rows, kTileRows); }
  int64_t tile_cols() const { return ceil_div(cols, kTileCols); }
};

/// Adds one slab of the contraction to the sums of a region.
inline void add_slab(const GemmProblem& p, const Region& region, const Slab& slab, const Workspace& w) {
  const int64_t rows = region.tile_rows() * kTileRows;
  for (int64_t i = 0; i < rows; i += kGroup) decode_group<true>(p.a, region.row + i, slab, w.a.get() + i * kSlab);
  const bool scaled = has_block_scales(p.a) || has_block_scales(p.b);
  if (scaled) decode_scales<true>(p.a, region.row, slab, rows, w.a_scale.get());
  float* sum = w.sum.get();
  for (int64_t j = 0; j < region.cols; j += kTileCols) {
    for (int64_t k = 0; k < kTileCols; k += kGroup)
      decode_group<false>(p.b, region.col + j + k, slab, w.b.get() + k * kSlab);
    if (scaled) decode_scales<false>(p.b, region.col + j, slab, kTileCols, w.b_scale.get());
    for (int64_t i = 0; i < rows; i += kTileRows, sum += kTileRows * kTileCols) {
      const RegisterTile tile{w.a.get() + i * kSlab, w.a_scale.get() + i * kSlabBlocks, w.b.get(), w.b_scale.get(),
                              sum};
      const int64_t left = std::min<int64_t>(region.rows - i, kTileRows);
      if (scaled) {
        multiply_rows<kTileRows, true>(tile, slab, left);
      } else {
        multiply_rows<kTileRows, false>(tile, slab, left);
      }
    }
  }
}

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

/// Scales, biases and rounds the sums of a region.
inline void finish_region(const GemmProblem& p, const Region& region, const float* sum) {
  const Columns columns(p, region);
  const F32 constant = broadcast(constant_factor(p.a, p.b));
  const int64_t tile_stride = region.tile_rows() * kTileRows * kTileCols;
  for (int64_t i = 0; i < region.rows; ++i, sum += kTileCols) {
    const F32 row_factor = broadcast(line_factor(p.a, region.row + i));
    alignas(64) float values[kRegionCols];
    for (int64_t j = 0; j < region.cols; j += kLanes) {
      // The sum first: factors alone may leave float32 where the output is an ordinary number.
      const F32 scaled = load(sum + j / kTileCols * tile_stride + j % kTileCols) * constant * row_factor;
      const F32 value = scaled * load(columns.factor + j);
      store(values + j, p.bias ? value + load(columns.bias + j) : value);
    }
    const int64_t at = ((region.row + i) * p.out.row_stride + region.col) * size_of(p.out.dtype);
    const char* addend = p.addend ? static_cast<const char*>(p.addend) + at : nullptr;
    store_outputs(p.out.dtype, values, region.cols, addend, static_cast<char*>(p.out.data) + at);
  }
}

inline void multiply_region(const GemmProblem& p, const Region& region, const Workspace& w) {
  const auto summed = [](const Operand& o) { return std::min<int64_t>(block_length(o.spec, kMaxBlock), kMaxBlock); };
  const int64_t sums = region.tile_rows() * kTileRows * region.tile_cols() * kTileCols;
  std::memset(w.sum.get(), 0, sizeof(float) * static_cast<size_t>(sums));
  for (int64_t l = 0; l < p.a.contraction; l += kSlab) {
    const int64_t size = std::min(p.a.contraction - l, kSlab);
    add_slab(p, region, {l, size, round_up(size, kGroup), std::min(summed(p.a), summed(p.b))}, w);
  }
  finish_region(p, region, w.sum.get());
}

void gemm(const GemmProblem& p) {
  if (p.a.outer == 0 || p.b.outer == 0) return;
  const Cut cut = cut_output(p.a.outer, p.b.outer);
  parallel_for(cut.count, 1, [&](int64_t begin, int64_t end) {
    const Workspace w(cut);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / cut.across * cut.rows, col = i % cut.across * cut.cols;
      multiply_region(p, {row, col, std::min(cut.rows, p.a.outer - row), std::min(cut.cols, p.b.outer - col)}, w);
    }
  });
}
