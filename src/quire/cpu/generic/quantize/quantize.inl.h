// Quantization of a tensor: what its scales depend on first, then tiles of it, both directions from one read.
#pragma once

#include "quire/cpu/generic/elements/codes.inl.h"
#include "quire/cpu/generic/elements/encode.inl.h"
#include "quire/cpu/generic/elements/lines.inl.h"
#include "quire/cpu/generic/elements/plain.inl.h"
#include "quire/cpu/generic/quantize/amax.inl.h"
#include "quire/cpu/generic/quantize/hadamard.inl.h"
#include "quire/cpu/generic/quantize/quantize_columns.inl.h"
#include "quire/cpu/generic/quantize/quantize_rows.inl.h"
#include "quire/cpu/generic/quantize/values.inl.h"

/// The directions of a problem that are wanted.
struct Plan {
  const QuantizeProblem& problem;
  std::array<Job, 2> both;  ///< of which those without memory are not wanted

  bool has(Direction d) const { return (d == Direction::rowwise ? problem.rowwise : problem.columnwise).data; }
  /// Rowwise before columnwise.
  std::span<const Job> jobs() const {
    const size_t first = has(Direction::rowwise) ? 0 : 1, end = has(Direction::columnwise) ? 2 : 1;
    return std::span(both).subspan(first, end - first);
  }
  /// Whether lines are rows and scales their own.
  bool by_lines() const { return !has(Direction::columnwise) && !problem.spec.square; }
  /// Whether columnwise codes lie along rows too, and scales are their own.
  bool across() const {
    return has(Direction::columnwise) && blocks_first(problem.spec, Direction::columnwise) && !problem.spec.square;
  }
  /// Whether both directions are wanted, multiply an element by the same number and round it alike: then they have the
  /// same codes.
  bool codes_are_shared() const {
    const QuantSpec& s = problem.spec;
    return jobs().size() == 2 && (s.square || s.row().scope == Scope::tensor) && !s.row_scaled && !s.stochastic &&
           s.four_over_six == FourOverSix::off && s.hadamard == Hadamard::off &&
           problem.amax.rowwise == problem.amax.columnwise;
  }
  /// Whether every direction that is wanted has its amaxes.
  bool amaxes_are_given() const {
    for (const Job& job : jobs())
      if (!job.given_amaxes()) return false;
    return true;
  }
};

/// Whether the scales of a block of columns are contiguous over lines: those of 1 x 128 blocks.
bool scales_cross_lines(const QuantSpec& spec) {
  return spec.row().scale == ScaleKind::f32 && spec.row().scope == Scope::block && !spec.square;
}

/// Rows of the tiles of a plan: those of the tallest block. A tile that ends up transposed is as tall as it is wide.
int64_t tile_rows(const Plan& plan) {
  if (plan.by_lines()) return scales_cross_lines(plan.problem.spec) ? kLaneGroup : 1;
  const bool transposed = plan.has(Direction::columnwise) && plan.problem.spec.row().transposed;
  return transposed ? kTile : plan.problem.spec.row().block;
}
int64_t tile_cols(const Plan& plan) {
  if (plan.across()) return kPieceOfLine;
  return plan.by_lines() ? kPieceOfLine / (tile_rows(plan) > 1 ? 2 : 1) : kTile;
}

/// Whether what is stored above the blocks comes with the problem, which is then no multiplier.
bool has_given_global(const QuantizeProblem& p) { return p.spec.given && p.spec.row().scale == ScaleKind::two_level; }

/// Fills what covers more than a tile: amaxes, multipliers of a tensor or of lines, the padding of swizzled scales.
void begin(const Job& job, float tensor_amax) {
  const QuantSpec& spec = job.spec();
  const Matrix& x = job.problem.x;
  const bool per_line = spec.row().scope == Scope::row || spec.row_scaled;
  // Amaxes that are not kept are found where the scales that follow from them will be.
  float* const amaxes = spec.row().has_amax ? job.side.amax : static_cast<float*>(job.side.scale);
  // Amaxes: given ones, or the given number above the blocks, or measured along lines, or that of the tensor.
  if (job.given_amaxes())
    std::copy_n(job.given_amaxes(), amax_count(spec, job.outer), amaxes);
  else if (has_given_global(job.problem))
    *amaxes = *job.problem.scale;
  else if (per_line)
    (job.direction == Direction::rowwise ? row_amaxes : column_amaxes)(x, amaxes);
  else if (spec.row().has_amax || spec.row().scope != Scope::block)
    *amaxes = tensor_amax;
  // Where a spec stores something other than the amax above its blocks, that takes its place.
  const bool measured = !has_given_global(job.problem);
  for (int64_t i = 0; spec.global != Global::amax && measured && i < amax_count(spec, job.outer); ++i)
    amaxes[i] = stored_global(amaxes[i], spec);
  // Until finish(), the memory of scales holds multipliers.
  for (int64_t i = 0; i < job.multipliers(); ++i)
    job.multiplier()[i] = spec.given          ? 1.0f / *job.problem.scale
                          : job.problem.scale ? *job.problem.scale
                                              : scale_from_amax(amaxes[i], spec, kFloatMax);
  // Swizzled scales are padded to whole tiles: the padding is zero, and blocks write the others.
  if (spec.swizzled) {
    const Shape<int64_t> sizes = buffers<int64_t>(spec, {x.rows, x.cols}, job.direction).scale.sizes;
    std::fill_n(static_cast<uint8_t*>(job.side.scale), product(sizes, 0, sizes.size()), uint8_t{0});
  }
}

/// Scales take the place of what begin() left there. amax: the one that the tiles have.
void finish(const Job& job, float amax) {
  const bool lost = job.problem.scale && job.spec().nan && !is_finite(amax);
  for (int64_t i = 0; i < job.multipliers(); ++i)
    job.multiplier()[i] = lost               ? std::numeric_limits<float>::quiet_NaN()
                          : job.spec().given ? *job.problem.scale
                                             : 1.0f / job.multiplier()[i];
}

/// Memory of a thread while it quantizes tiles.
struct QuantizeScratch {
  TileScratch tile, transform;
  ColumnScratch columns;
};

/// Returns the amax of the elements.
template <Format F, ScaleKind S, DType D>
float quantize_values(const Plan& plan, const Values<D>& v, QuantizeScratch& scratch) {
  // The same codes in both directions: encode once, transpose bytes.
  if (plan.codes_are_shared()) {
    BlockNumbers<S> numbers;
    const float amax = quantize_rows<F, S, D>(plan.jobs()[0], v, numbers, scratch.columns.codes);
    transpose_quantized<F, S, D>(plan.jobs()[1], v, numbers, scratch.columns);
    return amax;
  }
  // Otherwise each direction reads the tile by itself. It is in a cache by then.
  float amax = 0;
  for (const Job& job : plan.jobs()) {
    if (job.direction == Direction::rowwise) {
      const int64_t height = plan.across() ? 1 : v.rows;
      for (int64_t r = 0; r < v.rows; r += height)
        amax = std::max(amax, quantize_rows<F, S, D>(job, plan.by_lines() ? v : v.part(r, height)));
    } else if (S == ScaleKind::two_level && plan.problem.spec.hadamard != Hadamard::off) {
      if constexpr (S == ScaleKind::two_level)
        quantize_columns<F, S, DType::bf16>(job, transformed<D>(v, plan.problem.spec.hadamard, scratch.transform),
                                            scratch.columns);
    } else {
      amax = quantize_columns<F, S, D>(job, v, scratch.columns);
    }
  }
  return amax;
}

/// Returns the amax of the tile's elements. They are read where they lie, but for columns that are no whole tile and
/// for packed columns of rows that are no whole blocks: those are copied and padded.
template <Format F, ScaleKind S, DType D>
float quantize_tile(const Plan& plan, const Rows& from, const Tile& tile, QuantizeScratch& scratch) {
  // How many columns can be read where they lie.
  constexpr int64_t block = 32;  // a multiple of the rows of every packed block
  const bool in_place = plan.by_lines() || !row(F).packed() || tile.rows % block == 0;
  const int64_t whole = in_place ? tile.cols / kTile * kTile : 0;
  const auto quantize_part = [&](Values<D> v, const Tile& part) {
    if (tile_rows(plan) == 1)
      v.meanwhile.one_line = true;
    else
      v.meanwhile = {next_tile(from.x, part), false, &scratch.columns.finished};
    return quantize_values<F, S, D>(plan, v, scratch);
  };
  float amax = 0;
  if (whole > 0) {
    const Tile part{tile.row, tile.col, tile.rows, whole};
    amax = quantize_part(values_at<D>(from, part), part);
  }
  if (whole == tile.cols) return amax;
  // What remains is copied and padded with zeros, which change no amax.
  const Tile rest{tile.row, tile.col + whole, tile.rows, tile.cols - whole};
  const int64_t rows = in_place ? tile.rows : round_up(tile.rows, block);
  return std::max(amax, quantize_part(load_tile<D>(from, rest, rows, scratch.tile), rest));
}

using QuantizeTile = float (*)(const Plan&, const Rows&, const Tile&, QuantizeScratch&);

QuantizeTile tile_quantizer(const QuantSpec& spec, DType dtype) {
  QuantizeTile found = nullptr;
  with_kinds(spec, dtype, [&](auto f, auto s, auto d) { found = quantize_tile<f, s, d>; });
  return found;
}

/// All tiles of some rows; returns their amax.
float quantize_strip(const Plan& plan, const Rows& strip, QuantizeScratch& scratch) {
  const QuantizeTile quantize_one = tile_quantizer(plan.problem.spec, strip.x.dtype);
  const int64_t rows = tile_rows(plan), cols = tile_cols(plan);
  const int64_t tiles = ceil_div(strip.x.rows, rows) * ceil_div(strip.x.cols, cols);
  float amax = 0;
  for (int64_t t = 0; t < tiles; ++t)
    amax = std::max(amax, quantize_one(plan, strip, tile_at(strip.x, rows, cols, t), scratch));
  scratch.columns.finished.put_all();
  return amax;
}

/// All tiles, as many at a time as the executor likes; returns the amax of the tensor.
float quantize_tiles(const Plan& plan) {
  const Matrix& x = plan.problem.x;
  const QuantizeTile quantize_one = tile_quantizer(plan.problem.spec, x.dtype);
  const int64_t rows = tile_rows(plan), cols = tile_cols(plan), tiles = ceil_div(x.rows, rows) * ceil_div(x.cols, cols);
  // Tiles are independent: begin() has settled what they share. Each thread keeps a scratch and an amax of its own.
  SharedMaximum found;
  const int64_t elements = std::max<int64_t>(1, std::min(rows, x.rows) * std::min(cols, x.cols));
  parallel_for(tiles, std::max<int64_t>(1, kGrain / elements), [&](int64_t begin, int64_t end) {
    QuantizeScratch scratch;
    float amax = 0;
    for (int64_t t = begin; t < end; ++t)
      amax = std::max(amax, quantize_one(plan, {x, 0}, tile_at(x, rows, cols, t), scratch));
    // The codes of the last tile are still in the scratch; streamed stores must be done before others read them.
    scratch.columns.finished.put_all();
    found.add(amax);
    finish_streams();
  });
  return found.value();
}

Job job_of(const QuantizeProblem& p, Direction direction) {
  const int64_t m = p.x.rows, k = p.x.cols, tokens = columnwise_tokens(p.spec, m);
  const bool streams = m * k / (p.spec.packed() ? 2 : 1) >= kStreamBytes;
  if (direction == Direction::rowwise)
    return {p, direction, p.rowwise, m, k, block_count(p.spec, k), p.random.rowwise_offset, streams};
  return {p, direction, p.columnwise, k, tokens, block_count(p.spec, tokens), p.random.columnwise_offset, streams};
}

Plan plan_of(const QuantizeProblem& p) {
  return {p, {job_of(p, Direction::rowwise), job_of(p, Direction::columnwise)}};
}

/// Whether the directions share one amax.
bool has_one_amax(const QuantSpec& spec) { return spec.row().has_amax && !spec.row_scaled; }

/// The amaxes that have to be known before the first block: none where they are not asked for or a scale is given.
Amaxes amaxes_of(const QuantizeProblem& p) {
  if (!has_one_amax(p.spec) || p.scale || plan_of(p).amaxes_are_given()) return {};
  const bool columns = p.columnwise.data && !p.amax.columnwise;
  if (columns && p.spec.hadamard != Hadamard::off) return transformed_amaxes(p.x, p.spec.hadamard);
  return {tensor_amax(p.x)};
}

/// `amaxes`: those of x, as amaxes_of() gives them.
void quantize_under(const QuantizeProblem& p, const Amaxes& amaxes) {
  const Plan plan = plan_of(p);
  // What tiles share, then all tiles, then scales in place of multipliers.
  for (const Job& job : plan.jobs()) {
    const bool transformed = job.direction == Direction::columnwise && p.spec.hadamard != Hadamard::off;
    begin(job, transformed ? amaxes.transformed : amaxes.plain);
  }
  const float amax = quantize_tiles(plan);
  for (const Job& job : plan.jobs()) {
    finish(job, amax);
    if (p.scale && !has_given_global(p)) job.side.amax[0] = amax;
  }
}

/// Transforms round to bfloat16, so the amax of a columnwise side that is transformed is not that of x.
void amax(const AmaxProblem& p) {
  const FloatMode mode;
  if (!has_one_amax(p.spec)) {
    if (p.rowwise) row_amaxes(p.x, p.rowwise);
    if (p.columnwise) column_amaxes(p.x, p.columnwise);
    return;
  }
  const bool transforms = p.columnwise && p.spec.hadamard != Hadamard::off;
  const Amaxes found = transforms ? transformed_amaxes(p.x, p.spec.hadamard) : Amaxes{tensor_amax(p.x)};
  if (p.rowwise) *p.rowwise = found.plain;
  if (p.columnwise) *p.columnwise = transforms ? found.transformed : found.plain;
}

void quantize(const QuantizeProblem& p) {
  // begin() computes scales outside of parallel_for.
  const FloatMode mode;
  if (p.rowwise.data || p.columnwise.data) quantize_under(p, amaxes_of(p));
}
