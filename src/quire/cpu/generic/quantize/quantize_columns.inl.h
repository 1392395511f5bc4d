// Columnwise quantization: lanes are columns, so that nothing is transposed but finished codes, a word of them at a
// time.
#pragma once

#include "quire/cpu/generic/elements/codes.inl.h"
#include "quire/cpu/generic/elements/encode.inl.h"
#include "quire/cpu/generic/elements/lines.inl.h"
#include "quire/cpu/generic/elements/plain.inl.h"
#include "quire/cpu/generic/elements/transpose.inl.h"
#include "quire/cpu/generic/quantize/amax.inl.h"
#include "quire/cpu/generic/quantize/nvfp4.inl.h"
#include "quire/cpu/generic/quantize/quantize_rows.inl.h"
#include "quire/cpu/generic/quantize/scales.inl.h"
#include "quire/cpu/generic/quantize/values.inl.h"

/// What a tile needs while its columns are quantized.
struct ColumnScratch {
  Finished finished;
  alignas(64) uint32_t words[kTile / 8][kTile + 16];  ///< packed codes of 8 rows of a column
  alignas(64) uint8_t codes[kTile][kTile];
  alignas(64) uint8_t scales[kLaneGroup][kTile], transposed_scales[kTile][kLaneGroup];  ///< bytes of blocks of rows
  alignas(64) uint32_t random[4][kTile];
};

/// Numbers of the blocks of the columns that are quantized at once, whole kTile of them: more than kTile where codes
/// lie along rows.
template <ScaleKind S>
struct ColumnNumbers {
  int64_t count;
  alignas(64) float amax[kPieceOfLine];
  alignas(64) float multiplier[kPieceOfLine];
  alignas(64) Stored<S> stored[kPieceOfLine];
};

/// amax of every column of rows [r, r + height); returns the largest bits, with NaN above infinity without kNan.
template <DType D, bool kNan>
inline Bits<D> column_block_amaxes(const Values<D>& v, int64_t r, int64_t height, int64_t count, float* amax) {
  alignas(64) Bits<D> found[kPieceOfLine];
  column_magnitudes<D, kNan>(v.line(r), v.stride, height, count, found);
  for (int64_t c = 0; c < count; c += kLanes) store(amax + c, load_as<D>(reinterpret_cast<const Plain<D>*>(found + c)));
  return line_magnitude<D, false>(reinterpret_cast<const Plain<D>*>(found), count);
}

/// Neighbours of a square tile share their largest amax.
inline void share_amaxes(int64_t n, int64_t count, float* amax) {
  for (int64_t c = 0; c < count; c += n) std::fill_n(amax + c, n, *std::max_element(amax + c, amax + c + n));
}

template <DType D>
void column_four_over_six(const Job& job, const Values<D>& v, int64_t r, ColumnNumbers<ScaleKind::two_level>& b) {
  // Candidates are compared along blocks, so the columns are copied to lines first.
  const Scratch rows(kNvfp4Block * kLineStride), columns(kTile * kLineStride);
  for (int64_t i = 0; i < kNvfp4Block; ++i) read_whole<D>(v.line(r + i), kTile, rows.get() + i * kLineStride);
  transpose_and_transform(rows.get(), kTile, columns.get());
  // One choice for each block, or for each square of 16 columns.
  const int64_t height = job.spec().square ? kNvfp4Block : 1;
  for (int64_t c = 0; c < v.cols; c += height) {
    const int64_t count = std::min(height, v.cols - c);
    const float* values = columns.get() + c * kLineStride;
    const GlobalScale global = job.rule(v.col + c).global;
    const Nvfp4Scale s = four_over_six_scale(job.spec(), values, count, b.amax[c], global);
    for (int64_t i = c; i < c + count; ++i) {
      b.stored[i] = s.byte;
      b.multiplier[i] = s.multiplier;
    }
  }
}

/// The blocks of columns whose scales are NaN.
template <ScaleKind S>
using LostColumnBlocks = LostBlocks<S, kPieceOfLine>;

/// Multipliers of the columns of a block of rows, and their scales.
template <ScaleKind S, DType D>
void column_scales(const Job& job, const Values<D>& v, int64_t r, const LostColumnBlocks<S>& lost,
                   ColumnNumbers<S>& b) {
  // Known before the blocks: one for all columns, or one for each. Columns of padding repeat the last.
  if (job.given(v.col)) {
    const bool one = job.multipliers() == 1;
    for (int64_t c = 0; c < b.count; ++c) b.multiplier[c] = *job.given(one ? 0 : v.col + std::min(c, v.cols - 1));
    return;
  }
  // From the amaxes of the blocks, lane by lane.
  if (job.spec().square) share_amaxes(block_of(S), b.count, b.amax);
  if (S == ScaleKind::two_level && job.spec().four_over_six != FourOverSix::off) {
    if constexpr (S == ScaleKind::two_level) column_four_over_six(job, v, r, b);
  } else if (job.spec().row_scaled) {
    for (int64_t c = 0; c < v.cols; ++c) {
      alignas(64) float amax[kLanes] = {b.amax[c]}, multiplier[kLanes];
      Stored<S> stored[kLanes];
      block_scales<S>(job.rule(v.col + c), amax, 1, stored, multiplier);
      b.stored[c] = stored[0];
      b.multiplier[c] = multiplier[0];
    }
  } else {
    block_scales<S>(job.rule(0), b.amax, b.count, b.stored, b.multiplier);
  }
  lost.apply(b.count, b.stored);
}

/// Neighbours of a square tile are lost together.
template <ScaleKind S>
LostColumnBlocks<S> lost_columns(const Job& job, const ColumnNumbers<S>& b) {
  LostColumnBlocks<S> lost;
  lost.find(b.amax, b.count);
  constexpr int64_t n = block_of(S);
  for (int64_t c = 0; job.spec().square && c < b.count; c += n)
    std::fill_n(lost.lost + c, n, std::count(lost.lost + c, lost.lost + c + n, true) > 0);
  return lost;
}

/// Stores the scales of a block of rows where those of neighbouring columns are contiguous, or wherever they are.
template <ScaleKind S>
void store_column_scales(const Job& job, const Tile& at, const Stored<S>* stored) {
  const int64_t block = at.row / block_of(S);
  auto* to = static_cast<Stored<S>*>(job.side.scale);
  if (job.scale_at(1, block) == job.scale_at(0, block) + 1)
    return void(
        std::memcpy(to + job.scale_at(at.col, block), stored, static_cast<size_t>(at.cols) * sizeof(Stored<S>)));
  for (int64_t c = 0; c < at.cols; ++c) to[job.scale_at(at.col + c, block)] = stored[c];
}

/// Stores the scales of all blocks of a tile where those of a column are contiguous.
void store_transposed_scales(const Job& job, const Tile& at, int64_t blocks, ColumnScratch& s) {
  auto* to = static_cast<uint8_t*>(job.side.scale) + job.scale_at(at.col, at.row / job.spec().row().block);
  for (int64_t c = 0; c < kTile; c += kLaneGroup)
    transpose_codes(&s.scales[0][c], kTile, s.transposed_scales[c], kLaneGroup);
  for (int64_t c = 0; c < at.cols; ++c)
    std::memcpy(to + c * job.blocks, s.transposed_scales[c], static_cast<size_t>(blocks));
}

/// Encodes rows under the multipliers of their columns. Elements are finite, or else with kNan.
template <Format F, ScaleKind S, bool kNan, DType D>
class ColumnEncoder {
 public:
  static constexpr bool kAlike = false;  ///< as in BlockFactors

  /// Of at most kPieceOfLine columns, whole quads.
  ColumnEncoder(const float* multiplier, int64_t count) : multiplier_(multiplier), count_(count) {
    // Words of bfloat16 are encoded as even and odd lanes: split multipliers and limits in the same way, once for all
    // rows.
    if constexpr (!kWords) return;
    powers_ = S == ScaleKind::e8m0 || are_powers(multiplier, count);
    for (int64_t c = 0; c < count; c += 2 * kLanes) {
      const F32 first = load(multiplier + c), second = load(multiplier + c + kLanes);
      const F32 even = every_second<0>(first, second, kAll), odd = every_second<1>(first, second, kAll);
      store(halves_ + c, even);
      store(halves_ + c + kLanes, odd);
      *reinterpret_cast<U16*>(limits_ + c) = low_halves(word_limits<F>(even, powers_), word_limits<F>(odd, powers_));
    }
  }

  /// Codes of one row, a byte each.
  void encode(const Plain<D>* x, const Sink<uint8_t>& out) const {
    if constexpr (!kWords)
      encode_by_lanes(x, out);
    else if (S == ScaleKind::e8m0 || powers_)
      encode_line_of_words<F, true>(x, *this, count_, out);
    else if constexpr (S != ScaleKind::e8m0)
      encode_line_of_words<F, false>(x, *this, count_, out);
  }

  /// Of the words from column c on.
  U16 limit(int64_t c) const { return *reinterpret_cast<const U16*>(limits_ + c); }
  Factor factor(int64_t c) const { return {load(halves_ + c), load(halves_ + c + kLanes), limit(c)}; }

 private:
  static constexpr bool kWords = D == DType::bf16 && !kNan && !row(F).packed();
  static constexpr auto kAll = std::make_integer_sequence<int, kLanes>();

  void encode_by_lanes(const Plain<D>* x, const Sink<uint8_t>& out) const {
    encode_quads(x, {0, count_}, out, [&](int64_t at, uint8_t* codes) {
      F32 v[4];
      load_as<D>(x + at, v);
#pragma GCC unroll 4
      for (int q = 0; q < 4; ++q) v[q] = v[q] * load(multiplier_ + at + q * kLanes);
      encode_quad<F, kNan>(v, codes);
      return true;
    });
  }

  const float* multiplier_;
  int64_t count_;
  bool powers_ = false;
  /// Multipliers of even and of odd columns, a vector each in turn.
  alignas(64) float halves_[kWords ? kPieceOfLine : 1];
  alignas(64) uint16_t limits_[kWords ? kPieceOfLine : 1];
};

/// Words of the packed codes of 8 rows of each column.
template <Format F, bool kNan, DType D>
inline void encode_down(const Values<D>& v, int64_t r, const float* multiplier, uint32_t* words) {
  if constexpr (D == DType::bf16) {
    for (int64_t c = 0; c < kTile; c += 2 * kLanes)
      encode_packed_down<kNan>(v.line(r) + c, v.stride, multiplier + c, words + c);
    return;
  }
  for (int64_t c = 0; c < kTile; c += kLanes) {
    const F32 m = load(multiplier + c);
    U32 word{};
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) word |= encode_lanes<F, kNan>(load_as<D>(v.line(r + i) + c) * m) << (i * 4);
    *reinterpret_cast<U32*>(words + c) = word;
  }
}

/// The same with stochastic rounding; `random` holds the words of the 16 rows from a multiple of 16 on.
template <bool kNan, DType D>
inline void encode_down_stochastic(const Values<D>& v, int64_t r, const float* multiplier,
                                   const uint32_t (&random)[4][kTile], uint32_t* words) {
  for (int64_t c = 0; c < kTile; c += kLanes) {
    const F32 m = load(multiplier + c);
    U32 word{};
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      const U32 drawn = *reinterpret_cast<const U32*>(&random[(r + i) % kNvfp4Block / 4][c]);
      const U32 byte = drawn >> ((r + i) % 4 * 8) & 0xFFu;
      word |= encode_stochastic_lanes<kNan>(load_as<D>(v.line(r + i) + c) * m, byte) << (i * 4);
    }
    *reinterpret_cast<U32*>(words + c) = word;
  }
}

/// Packed codes of rows, left in `s.words`.
template <Format F, ScaleKind S, bool kNan, DType D>
void encode_packed_columns(const Job& job, const Values<D>& v, std::array<int64_t, 2> rows, const float* multiplier,
                           ColumnScratch& s) {
  // Random words of the block of rows, all columns at once.
  const bool stochastic = S == ScaleKind::two_level && job.spec().stochastic;
  if (stochastic) {
    uint64_t numbers[kTile];
    job.block_numbers(v.col, (v.row + rows[0]) / kNvfp4Block, numbers);
    draw_columns({job.problem.random.seed, job.offset}, numbers, s.random);
  }
  // Eight rows make a word of packed codes for each column. The words are transposed when the tile is done.
  for (int64_t r = rows[0]; r < rows[1]; r += 8) {
    for (int64_t i = 0; i < 8; ++i) v.meanwhile.at_row(r + i);
    if (stochastic)
      encode_down_stochastic<kNan, D>(v, r, multiplier, s.random, s.words[r / 8]);
    else
      encode_down<F, kNan, D>(v, r, multiplier, s.words[r / 8]);
  }
}

/// Codes of rows: stored where they belong if rows are contiguous, else left in `s`.
template <Format F, ScaleKind S, bool kNan, DType D>
void encode_rows_of_columns(const Job& job, const Values<D>& v, std::array<int64_t, 2> rows, const float* multiplier,
                            ColumnScratch& s) {
  if constexpr (row(F).packed()) return encode_packed_columns<F, S, kNan, D>(job, v, rows, multiplier, s);
  // Codes along rows go to the result; codes along columns stay in s.codes until the tile is transposed.
  const bool across = blocks_first(job.spec(), job.direction);
  alignas(64) uint8_t memory[kPieceOfLine];
  const int64_t padded = round_up(v.cols, kQuad);
  const ColumnEncoder<F, S, kNan, D> encoder(multiplier, padded);
  for (int64_t r = rows[0]; r < rows[1]; ++r) {
    v.meanwhile.at_row(r);
    uint8_t* to = across ? job.code_at(v.col, v.row + r) : nullptr;
    const bool direct = across && padded == v.cols && reinterpret_cast<uintptr_t>(to) % 64 == 0;
    uint8_t* codes = across ? memory : s.codes[r];
    encoder.encode(v.line(r), {direct ? to : codes, direct && job.streams});
    if (across && !direct) put(codes, v.cols, to, job.streams);
  }
}

/// Says where the finished codes of the columns of a tile belong.
inline void finish_columns(const Job& job, const Tile& at, Finished& finished) {
  finished.to = job.code_at(at.col, at.row);
  finished.stride = at.cols > 1 ? job.code_at(at.col + 1, at.row) - finished.to : 0;
  finished.bytes = job.spec().packed() ? ceil_div(at.rows, 2) : at.rows;
  finished.lines = at.cols;
  finished.streams = job.streams;
  finished.done = 0;
}

/// Turns words of packed codes, which are in `s.words` for kTile columns.
inline void transpose_words(int64_t words, ColumnScratch& s) {
  for (int64_t w = 0; w < words; w += kLanes)
    for (int64_t c = 0; c < kTile; c += kLanes) {
      alignas(64) F32 v[kLanes];
      for (int i = 0; i < kLanes; ++i) v[i] = load(reinterpret_cast<const float*>(&s.words[w + i][c]));
      transpose(v);
      for (int i = 0; i < kLanes; ++i) store(reinterpret_cast<float*>(&s.finished.codes[c + i][w * 4]), v[i]);
    }
}

/// Scales and codes of the columns of at most kTile x kTile values, or of one block of rows of kPieceOfLine columns.
/// Returns their amax.
template <Format F, ScaleKind S, DType D>
float quantize_columns(const Job& job, const Values<D>& v, ColumnScratch& s) {
  // Blocks of n rows; all rows are one block where multipliers are given.
  const float* given = job.given(v.col);
  const int64_t n = given ? kTile : block_of(S);
  const Tile at{v.row, v.col, v.rows, v.cols};
  const bool transposed = !blocks_first(job.spec(), job.direction),
             transposed_scales = transposed && S != ScaleKind::f32 && !job.spec().swizzled;
  const int64_t end = row(F).packed() ? round_up(v.rows, int64_t{8}) : v.rows;
  Bits<D> largest_of_tile{};
  ColumnNumbers<S> b;
  b.count = round_up(v.cols, kTile);
  for (int64_t r = 0; r < end; r += n) {
    // Amaxes of one block of rows, a lane for each column. A NaN shows as more than infinity.
    const std::array rows{r, std::min(r + n, end)};
    Bits<D> all = column_block_amaxes<D, false>(v, r, rows[1] - r, b.count, b.amax);
    const bool nan = all > kInfinity<D>, nonfinite = all >= kInfinity<D>;
    // Not finite: note the lost blocks while their amaxes show it, then search again without NaN.
    LostColumnBlocks<S> lost;
    if (nonfinite && !given && job.spec().nan) lost = lost_columns<S>(job, b);
    if (nan) all = column_block_amaxes<D, true>(v, r, rows[1] - r, b.count, b.amax);
    largest_of_tile = std::max(largest_of_tile, all);
    // Multipliers and scales. Those of a column that are contiguous wait in s.scales, to be transposed at the end.
    column_scales<S, D>(job, v, r, lost, b);
    if (transposed_scales && !given)
      std::memcpy(s.scales[r / n], b.stored, kTile);
    else if (!given)
      store_column_scales<S>(job, {v.row + r, v.col, n, v.cols}, b.stored);
    // Codes. Only elements that may be NaN take the slower encoder.
    if (nonfinite || makes_nan(job, v.col, v.cols))
      encode_rows_of_columns<F, S, true, D>(job, v, rows, b.multiplier, s);
    else
      encode_rows_of_columns<F, S, false, D>(job, v, rows, b.multiplier, s);
  }
  // The tile is done: its scales, then its codes, transposed.
  if (transposed_scales && !given) store_transposed_scales(job, at, ceil_div(v.rows, n), s);
  if (!transposed) return magnitude_value<D>(largest_of_tile);
  // Free the buffer of finished codes: those of the tile before may still be in it. The next tile puts these in place.
  s.finished.put_all();
  if constexpr (row(F).packed())
    transpose_words(end / 8, s);
  else
    transpose_tile(s.codes, end, kTile, s.finished.codes);
  finish_columns(job, at, s.finished);
  return magnitude_value<D>(largest_of_tile);
}

/// Stores columnwise scales of a tile whose blocks are squares, out of its rowwise ones.
template <ScaleKind S, DType D>
void store_scales_of_squares(const Job& job, const Values<D>& v, const BlockNumbers<S>& b, ColumnScratch& s) {
  constexpr int64_t n = block_of(S);
  const bool transposed = S != ScaleKind::f32 && !blocks_first(job.spec(), job.direction) && !job.spec().swizzled;
  for (int64_t r = 0; r < v.rows; r += n) {
    // The scale of a square is that of each of its columns.
    alignas(64) Stored<S> stored[kTile] = {};
    for (int64_t i = 0; i < b.per_line; ++i) std::fill_n(stored + i * n, n, b.stored[b.first_of(r) + i]);
    if (transposed)
      std::memcpy(s.scales[r / n], stored, kTile);
    else
      store_column_scales<S>(job, {v.row + r, v.col, n, v.cols}, stored);
  }
  if (transposed) store_transposed_scales(job, {v.row, v.col, v.rows, v.cols}, ceil_div(v.rows, n), s);
}

/// Columnwise scales and codes of a tile where both directions multiply by the same: rowwise ones, which `b` and
/// `s.codes` hold, transposed.
template <Format F, ScaleKind S, DType D>
void transpose_quantized(const Job& job, const Values<D>& v, const BlockNumbers<S>& b, ColumnScratch& s) {
  // Scales of squares. If one multiplier covers the tensor, finish() stores its scale.
  if (!job.given(v.col)) store_scales_of_squares<S, D>(job, v, b, s);
  // Codes that lie along rows here too are copied.
  if (blocks_first(job.spec(), job.direction)) {
    for (int64_t r = 0; r < v.rows; ++r) put(s.codes[r], v.cols, job.code_at(v.col, v.row + r), job.streams);
    return;
  }
  // Otherwise transposed as bytes, with rows of padding as zero, and packed as lines of columns.
  const int64_t padded = round_up(v.rows, kQuad);
  for (int64_t r = v.rows; r < padded; ++r) std::fill_n(s.codes[r], kTile, uint8_t{0});
  s.finished.put_all();
  transpose_tile(s.codes, padded, kTile, s.finished.codes);
  if constexpr (row(F).packed())
    for (auto& line : s.finished.codes) pack_codes(line, padded, line);
  finish_columns(job, {v.row, v.col, v.rows, v.cols}, s.finished);
  if (!job.streams) s.finished.put_all();
}
