// Quantization of a direction from tiles of float32 lines. Rows of a tile are the lines of the rowwise direction, its
// columns those of the columnwise one; from there on the two are the same.

/// One direction of a problem, and what must be known of the whole tensor before its blocks.
struct Job {
  const QuantizeProblem& problem;
  Direction direction;
  const Side& side;
  int64_t outer, contraction, blocks;
  uint64_t offset = 0;              ///< of stochastic rounding
  std::vector<float> multiplier{};  ///< where a scale covers the tensor (one) or a line (one per line)
  GlobalScale global{};             ///< NVFP4 with one amax

  const QuantSpec& spec() const { return problem.spec; }
  int64_t scale_at(int64_t line, int64_t block) const {
    return scale_index({spec(), direction, outer, blocks}, line, block);
  }
  /// The byte of code l of a line.
  uint8_t* code_at(int64_t line, int64_t l) const {
    const int64_t at = data_index({spec(), direction, outer, contraction}, line, l);
    return static_cast<uint8_t*>(side.data) + (spec().packed() ? at / 2 : at);
  }
};

/// The part of some lines that lies in one tile: `length` elements from `first` on of lines outer .. outer + count - 1.
struct Lines {
  const float* values;  ///< one line per kLineStride; +0 beyond `length`, at least to the end of the block
  int64_t outer, count, first, length;
};

/// Elements that share a scale of this kind along a line.
constexpr int64_t block_of(ScaleKind kind) {
  for (const FamilyRow& row : kFamilies)
    if (row.scale == kind && row.scope == Scope::block) return row.block;
  return 0;
}

/// Per-block numbers of the lines of a tile.
template <ScaleKind S>
using BlockValues = float[kTile][kTile / block_of(S)];

template <ScaleKind S>
[[gnu::flatten]] void block_amaxes(const Lines& lines, bool square, BlockValues<S>& amax) {
  constexpr int64_t n = block_of(S);
  const int64_t blocks = ceil_div(lines.length, n);
  for (int64_t i = 0; i < lines.count; ++i)
    for (int64_t b = 0; b < blocks; ++b)
      amax[i][b] = std::bit_cast<float>(line_magnitude(lines.values + i * kLineStride + b * n, n, kInfinity32));
  if (!square) return;
  for (int64_t i = 0; i < lines.count; i += n)
    for (int64_t b = 0; b < blocks; ++b) {
      float largest = 0;
      for (int64_t j = i; j < std::min(i + n, lines.count); ++j) largest = std::max(largest, amax[j][b]);
      for (int64_t j = i; j < std::min(i + n, lines.count); ++j) amax[j][b] = largest;
    }
}

/// Stores the scale of one block of one line; returns what multiplies its elements.
template <ScaleKind S>
[[gnu::flatten]] float place_scale(const Job& job, float amax, int64_t line, int64_t block) {
  const int64_t at = job.scale_at(line, block);
  if constexpr (S == ScaleKind::f32) {
    const float s = scale_from_amax(amax, job.spec(), largest_finite(job.problem.x.dtype));
    static_cast<float*>(job.side.scale)[at] = 1.0f / s;
    return s;
  } else if constexpr (S == ScaleKind::e8m0) {
    const uint8_t byte = e8m0_scale(amax, job.spec().element);
    static_cast<uint8_t*>(job.side.scale)[at] = byte;
    return e8m0_multiplier(byte);
  } else {
    const Nvfp4Scale scale = nvfp4_scale_of(
        amax, job.spec().row_scaled ? global_scale(job.side.amax[line], job.spec().e4m3_max()) : job.global);
    static_cast<uint8_t*>(job.side.scale)[at] = scale.byte;
    return scale.multiplier;
  }
}

/// The same for four-over-six, where the choice looks at the values.
void place_four_over_six(const Job& job, const Lines& lines, const BlockValues<ScaleKind::e4m3>& amax,
                         BlockValues<ScaleKind::e4m3>& multiplier) {
  const int64_t height = job.spec().square ? kNvfp4Block : 1;
  for (int64_t i = 0; i < lines.count; i += height)
    for (int64_t b = 0; b < ceil_div(lines.length, kNvfp4Block); ++b) {
      const int64_t count = std::min(height, lines.count - i);
      const Nvfp4Scale scale = four_over_six_scale(job.spec(), lines.values + i * kLineStride + b * kNvfp4Block, count,
                                                   amax[i][b], job.global);
      for (int64_t j = i; j < i + count; ++j) {
        multiplier[j][b] = scale.multiplier;
        static_cast<uint8_t*>(job.side.scale)[job.scale_at(lines.outer + j, lines.first / kNvfp4Block + b)] =
            scale.byte;
      }
    }
}

/// Stores the scales of all blocks of the lines and gives their multipliers.
template <ScaleKind S>
void place_scales(const Job& job, const Lines& lines, BlockValues<S>& multiplier) {
  constexpr int64_t n = block_of(S);
  const int64_t blocks = ceil_div(lines.length, n);
  if (job.spec().row().scope != Scope::block) {
    for (int64_t i = 0; i < lines.count; ++i)
      for (int64_t b = 0; b < blocks; ++b)
        multiplier[i][b] = job.multiplier[job.multiplier.size() == 1 ? 0 : static_cast<size_t>(lines.outer + i)];
    return;
  }
  BlockValues<S> amax;
  block_amaxes<S>(lines, job.spec().square, amax);
  if constexpr (S == ScaleKind::e4m3)
    if (job.spec().four_over_six != FourOverSix::off) return place_four_over_six(job, lines, amax, multiplier);
  for (int64_t i = 0; i < lines.count; ++i)
    for (int64_t b = 0; b < blocks; ++b)
      multiplier[i][b] = place_scale<S>(job, amax[i][b], lines.outer + i, lines.first / n + b);
}

/// Elements that are encoded together: as many codes as fill the widest vector.
constexpr int64_t kRun = 64;

/// Codes of whole runs that cover `count` elements.
template <Format F>
[[gnu::flatten]] void encode(const float* values, int64_t count, uint8_t* codes) {
  for (int64_t i = 0; i < count; i += kRun)
    for (int64_t j = i; j < i + kRun; ++j) codes[j] = encode_fast<F>(values[j]);
}

/// Codes of line i of the lines, one per byte.
template <Format F, ScaleKind S>
[[gnu::flatten]] void encode_line(const Job& job, const Lines& lines, int64_t i, const BlockValues<S>& multiplier,
                                  uint8_t* codes) {
  constexpr int64_t n = block_of(S);
  const float* values = lines.values + i * kLineStride;
  const int64_t blocks = ceil_div(lines.length, n);
  alignas(64) float scaled[kTile];
  for (int64_t b = 0; b < blocks; ++b)
    for (int64_t j = b * n; j < (b + 1) * n; ++j) scaled[j] = values[j] * multiplier[i][b];
  std::fill(scaled + blocks * n, scaled + kTile, 0.0f);
  if constexpr (S == ScaleKind::e4m3)
    if (job.spec().stochastic) {
      const int64_t first = (lines.outer + i) * job.blocks + lines.first / n;
      return encode_stochastic(scaled, blocks, {job.problem.random.seed, job.offset, static_cast<uint64_t>(first)},
                               codes);
    }
  encode<F>(scaled, lines.length, codes);
}

/// Two codes per byte. A code past an odd end is that of +0.
[[gnu::flatten]] inline void store_packed(const uint8_t* codes, int64_t count, uint8_t* to) {
  for (int64_t i = 0; i < ceil_div(count, 2); ++i) to[i] = pack(codes[2 * i], codes[2 * i + 1]);
}

using TileCodes = uint8_t[kTile][kTile];

/// Stores codes of lines that run against memory: element j of all lines is contiguous.
void store_across(const Job& job, const Lines& lines, const TileCodes& codes) {
  alignas(64) TileCodes turned;
  turn_codes(codes, lines.count, lines.length, turned);
  for (int64_t j = 0; j < lines.length; ++j)
    std::memcpy(job.code_at(lines.outer, lines.first + j), turned[j], static_cast<size_t>(lines.count));
}

template <Format F>
void store_along(const Job& job, const Lines& lines, const TileCodes& codes) {
  for (int64_t i = 0; i < lines.count; ++i) {
    uint8_t* to = job.code_at(lines.outer + i, lines.first);
    if constexpr (row(F).packed())
      store_packed(codes[i], lines.length, to);
    else
      std::memcpy(to, codes[i], static_cast<size_t>(lines.length));
  }
}

template <Format F, ScaleKind S>
void quantize_lines(const Job& job, const Lines& lines) {
  BlockValues<S> multiplier;
  place_scales<S>(job, lines, multiplier);
  alignas(64) TileCodes codes;
  for (int64_t i = 0; i < lines.count; ++i) encode_line<F, S>(job, lines, i, multiplier, codes[i]);
  if (!blocks_first(job.spec(), job.direction)) return store_along<F>(job, lines, codes);
  for (int64_t i = lines.count; i < round_up(lines.count, kGroup); ++i) std::fill_n(codes[i], kTile, uint8_t{0});
  store_across(job, lines, codes);
}

/// Fills what covers more than a tile: amaxes, scales of a tensor or of lines, the padding of swizzled scales.
void begin(Job& job, float tensor_amax) {
  const QuantSpec& spec = job.spec();
  const Matrix& x = job.problem.x;
  const bool per_line = spec.row().scope == Scope::row || spec.row_scaled;
  std::vector<float> amaxes(per_line ? static_cast<size_t>(job.outer) : 1, tensor_amax);
  if (per_line) (job.direction == Direction::rowwise ? row_amaxes : column_amaxes)(x, amaxes.data());
  if (spec.row().has_amax) std::copy(amaxes.begin(), amaxes.end(), job.side.amax);
  if (spec.row().scope != Scope::block) {
    float* stored = static_cast<float*>(job.side.scale);
    for (float& amax : amaxes) {
      const float s = job.problem.scale ? *job.problem.scale : scale_from_amax(amax, spec, kFloatMax);
      *stored++ = 1.0f / s;
      amax = s;
    }
    job.multiplier = std::move(amaxes);
  } else if (spec.row().has_amax) {
    job.global = global_scale(tensor_amax, spec.e4m3_max());
  }
  if (spec.swizzled) {
    const Shape<int64_t> sizes = buffers<int64_t>(spec, {x.rows, x.cols}, job.direction).scale.sizes;
    std::memset(job.side.scale, 0, static_cast<size_t>(product(sizes, 0, sizes.size())));
  }
}

/// Rows of the tiles of a direction; they all have kTile columns. Rows that are lines need no tall tile unless blocks
/// are square, and a short one stays in the first-level cache.
int64_t tile_rows(const Job& job) {
  if (job.direction == Direction::columnwise) return kTile;
  return job.spec().square ? job.spec().row().block : 16;
}

/// Rows of the tensor that are in memory: all of it, or a strip that has just been computed.
struct Rows {
  Matrix x;
  int64_t first;  ///< row of the tensor that row 0 of x is: on a boundary of blocks of lines that cross rows
};

template <Format F, ScaleKind S>
void quantize_tile(const Job& job, const Rows& from, const Tile& tile, float* buffer) {
  const int64_t row = from.first + tile.row;
  if (job.direction == Direction::rowwise) {
    load_rows(from.x, tile, buffer);
    quantize_lines<F, S>(job, {buffer, row, tile.rows, tile.col, tile.cols});
  } else {
    load_columns(from.x, tile, job.spec().hadamard, buffer);
    quantize_lines<F, S>(job, {buffer, tile.col, tile.cols, row, columnwise_tokens(job.spec(), tile.rows)});
  }
}

using QuantizeTile = void (*)(const Job&, const Rows&, const Tile&, float* buffer);

QuantizeTile tile_quantizer(const QuantSpec& spec) {
  constexpr Format e4m3 = Format::e4m3, e5m2 = Format::e5m2, e2m1 = Format::e2m1;
  const bool wide = spec.element == e5m2;
  if (spec.row().scale == ScaleKind::f32)
    return wide ? quantize_tile<e5m2, ScaleKind::f32> : quantize_tile<e4m3, ScaleKind::f32>;
  if (spec.row().scale == ScaleKind::e4m3) return quantize_tile<e2m1, ScaleKind::e4m3>;
  if (spec.packed()) return quantize_tile<e2m1, ScaleKind::e8m0>;
  return wide ? quantize_tile<e5m2, ScaleKind::e8m0> : quantize_tile<e4m3, ScaleKind::e8m0>;
}

/// All tiles of these rows, as many at a time as the executor likes.
void quantize_side(const Job& job) {
  const Matrix& x = job.problem.x;
  const QuantizeTile quantize_one = tile_quantizer(job.spec());
  const int64_t rows = tile_rows(job), tiles = ceil_div(x.rows, rows) * ceil_div(x.cols, kTile);
  parallel_for(tiles, kGrain / (rows * kTile), [&](int64_t begin, int64_t end) {
    const Scratch buffer(kTile * kLineStride);
    for (int64_t t = begin; t < end; ++t) quantize_one(job, {x, 0}, tile_at(x, rows, kTile, t), buffer.get());
  });
}

Job job_of(const QuantizeProblem& p, Direction direction) {
  const int64_t m = p.x.rows, k = p.x.cols, tokens = columnwise_tokens(p.spec, m);
  if (direction == Direction::rowwise)
    return {p, direction, p.rowwise, m, k, block_count(p.spec, k), p.random.rowwise_offset};
  return {p, direction, p.columnwise, k, tokens, block_count(p.spec, tokens), p.random.columnwise_offset};
}

/// Whether the directions share one amax that has to be known first.
bool has_one_amax(const QuantSpec& spec) { return spec.row().has_amax && !spec.row_scaled; }

/// amax: that of x, where has_one_amax.
void quantize_under(const QuantizeProblem& p, float amax) {
  const bool transformed = p.spec.hadamard != Hadamard::off;
  if (p.rowwise.data) {
    Job job = job_of(p, Direction::rowwise);
    begin(job, amax);
    quantize_side(job);
  }
  if (p.columnwise.data) {
    Job job = job_of(p, Direction::columnwise);
    begin(job, transformed ? hadamard_amax(p.x, p.spec.hadamard) : amax);
    quantize_side(job);
  }
}

void quantize(const QuantizeProblem& p) {
  // begin() computes scales outside of parallel_for.
  const FloatMode mode;
  const bool measured = p.rowwise.data || p.spec.hadamard == Hadamard::off;
  quantize_under(p, has_one_amax(p.spec) && measured ? tensor_amax(p.x) : 0.0f);
}
