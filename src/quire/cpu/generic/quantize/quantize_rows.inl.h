// Rowwise quantization: blocks run along memory, so scales and codes of a line are made where its elements lie.
#pragma once

#include "quire/cpu/generic/elements/encode.inl.h"
#include "quire/cpu/generic/elements/encode_bf16.inl.h"
#include "quire/cpu/generic/elements/lines.inl.h"
#include "quire/cpu/generic/elements/plain.inl.h"
#include "quire/cpu/generic/quantize/amax.inl.h"
#include "quire/cpu/generic/quantize/nvfp4.inl.h"
#include "quire/cpu/generic/quantize/scales.inl.h"
#include "quire/cpu/generic/quantize/values.inl.h"

/// One direction of a problem, and what must be known of the whole tensor before its blocks.
struct Job {
  const QuantizeProblem& problem;
  Direction direction;
  const Side& side;
  int64_t outer, contraction, blocks;
  uint64_t offset = 0;   ///< of stochastic rounding
  bool streams = false;  ///< whether codes bypass caches

  const QuantSpec& spec() const { return problem.spec; }
  int64_t scale_at(int64_t line, int64_t block) const {
    return scale_index({spec(), direction, outer, blocks}, line, block);
  }
  /// The byte of code l of a line. Left out of line, data_index made columns of mxfp8 a tenth slower (AVX2).
  [[gnu::flatten]] uint8_t* code_at(int64_t line, int64_t l) const {
    const int64_t at = data_index({spec(), direction, outer, contraction}, line, l);
    return static_cast<uint8_t*>(side.data) + (spec().packed() ? at / 2 : at);
  }
  /// Where the bits of stochastic rounding are drawn for a block of a line.
  uint64_t block_number(int64_t line, int64_t block) const {
    return static_cast<uint64_t>(problem.random.number(direction, {outer, blocks}, line, block));
  }
  /// The same for the block in each of several lines, from `line` on.
  template <size_t Count>
  void block_numbers(int64_t line, int64_t block, uint64_t (&numbers)[Count]) const {
    const Randomness& r = problem.random;
    const auto stride = static_cast<uint64_t>(r.stride(direction, blocks));
    const uint64_t first = block_number(line, block);
    for (size_t i = 0; i < Count; ++i)
      numbers[i] = r.cuts == 0 ? first + i * stride : block_number(line + static_cast<int64_t>(i), block);
  }
  /// The same for consecutive blocks of a line, and for what else fits into whole vectors: by vectors, because they are
  /// read as such at once, and a processor would wait for numbers that it stored one by one.
  void block_numbers_along(int64_t line, int64_t block, int64_t count, uint64_t* numbers) const {
    U64 place;
    for (int64_t j = 0; j < kDraws; ++j) place[j] = static_cast<uint64_t>(j);
    for (int64_t i = 0; i < count; i += kDraws) {
      U64 next = block_number(line, block + i) + place;
      for (int64_t j = 0; problem.random.cuts > 0 && j < kDraws; ++j) next[j] = block_number(line, block + i + j);
      *reinterpret_cast<U64*>(numbers + i) = next;
    }
  }
  /// Amaxes instead of those of x; null if there are none.
  const float* given_amaxes() const { return problem.amax.of(direction); }
  /// How many numbers are known before the blocks that multiply elements: one of a tensor, or one for each line.
  int64_t multipliers() const {
    return spec().row().scope == Scope::tensor ? 1 : spec().row().scope == Scope::row ? outer : 0;
  }
  /// Where they are until the scales, their reciprocals, are stored there.
  float* multiplier() const { return static_cast<float*>(side.scale); }
  /// What multiplies line's elements, where that is known before its blocks; else null.
  const float* given(int64_t line) const {
    return multipliers() == 0 ? nullptr : multiplier() + (spec().row().scope == Scope::tensor ? 0 : line);
  }
  ScaleRule rule(int64_t line) const {
    const float infinite = largest_finite(problem.x.dtype);
    if (!spec().row().has_amax) return {spec(), infinite, {}};
    return {spec(), infinite, global_scale(side.amax[amax_index(spec(), line)], spec())};
  }
};

/// Elements of a piece of a line that is quantized at once.
constexpr int64_t kPieceOfLine = 1024;

/// Numbers of the blocks of the lines that are quantized at once, line after line.
template <ScaleKind S>
struct BlockNumbers {
  static constexpr int64_t kMost = std::max(kPieceOfLine, kTile* kTile) / block_of(S) + 32;

  int64_t per_line, height;  ///< blocks of a line, and lines that share them
  alignas(64) float amax[kMost];
  alignas(64) float multiplier[kMost];
  alignas(64) Stored<S> stored[kMost];

  int64_t first_of(int64_t line) const { return line / height * per_line; }
  /// Of so many lines.
  int64_t count(int64_t lines) const { return first_of(lines - 1) + per_line; }
};

/// The largest magnitude of all lines, with NaN above infinity without kNan.
template <DType D, bool kNan>
inline Bits<D> rows_magnitude(const Values<D>& v) {
  Bits<D> found{};
  for (int64_t r = 0; r < v.rows; ++r) found = std::max(found, line_magnitude<D, kNan>(v.line(r), v.cols));
  return found;
}

/// Magnitudes of all blocks; returns the largest, with NaN above infinity without kNan.
template <ScaleKind S, DType D, bool kNan>
inline Bits<D> row_block_amaxes(const Values<D>& v, BlockNumbers<S>& b) {
  constexpr int64_t n = block_of(S);
  alignas(64) Bits<D> found[BlockNumbers<S>::kMost];
  for (int64_t line = 0; line < v.rows; line += b.height) {
    Bits<D>* at = found + b.first_of(line);
    const Plain<D>* x = v.line(line);
    alignas(64) Bits<D> of_columns[kTile];
    if (b.height > 1) {  // squares of a tile: whole vectors first, then along one line
      column_magnitudes<D, kNan>(x, v.stride, std::min(b.height, v.rows - line), kTile, of_columns);
      x = reinterpret_cast<const Plain<D>*>(of_columns);
    }
    // The amax of each block of the line, as bits, into `found`: several blocks at once, where they fill vectors.
    if constexpr (n == kNvfp4Block) {
      // Lines are padded to kTile elements, and what is found past the last block gives way to the next line.
      constexpr int64_t group = kTile / n, half = kWidth<D> / 2;
      if (b.per_line % (2 * group) == 0)
        block_magnitudes<D, n, kWidth<D>, kNan>(x, b.per_line, at);
      else
        block_magnitudes<D, n, 16 * half <= kTile ? kWidth<D> : half, kNan>(x, round_up(b.per_line, group), at);
    } else {
      constexpr int64_t group = 16 / static_cast<int64_t>(sizeof(Bits<D>));
      const int64_t whole = b.per_line / group * group;
      block_magnitudes<D, n, kWidth<D>, kNan>(x, whole, at);
      for (int64_t i = whole; i < b.per_line; ++i) at[i] = block_magnitude<D, n, kNan>(x + i * n);
    }
  }
  // Bits to float32, padded with zeros to whole vectors, and the largest of all.
  constexpr int64_t width = kWidth<D>;
  const int64_t count = b.count(v.rows), padded = round_up(count, width);
  std::fill(found + count, found + padded, Bits<D>{});
  Vec<Bits<D>, width> all{};
  for (int64_t i = 0; i < padded; i += width) {
    all = larger(all, *reinterpret_cast<const Vec<Bits<D>, width>*>(found + i));
    for (int64_t j = i; j < i + width; j += kLanes)
      store(b.amax + j, load_as<D>(reinterpret_cast<const Plain<D>*>(found + j)));
  }
  return largest<Bits<D>, width>(all);
}

/// The better of both candidates for every block (numerics.md 5.8).
template <DType D>
void row_four_over_six(const Job& job, const Values<D>& v, BlockNumbers<ScaleKind::two_level>& b) {
  alignas(64) float values[kNvfp4Block * kLineStride];
  for (int64_t line = 0; line < v.rows; line += b.height) {
    const ScaleRule rule = job.rule(v.row + line);
    for (int64_t i = 0; i < b.per_line; ++i) {
      const int64_t count = std::min(b.height, v.rows - line), at = b.first_of(line) + i;
      for (int64_t j = 0; j < count; ++j)
        read_whole<D>(v.line(line + j) + i * kNvfp4Block, kNvfp4Block, values + j * kLineStride);
      const Nvfp4Scale s = four_over_six_scale(job.spec(), values, count, b.amax[at], rule.global);
      b.stored[at] = s.byte;
      b.multiplier[at] = s.multiplier;
    }
  }
}

/// The blocks of some lines whose scales are NaN.
template <ScaleKind S>
using LostRowBlocks = LostBlocks<S, BlockNumbers<S>::kMost>;

/// Scales of all blocks from their amaxes, stored.
template <ScaleKind S, DType D>
void row_scales(const Job& job, const Values<D>& v, const LostRowBlocks<S>& lost, BlockNumbers<S>& b) {
  // Stored scales and multipliers of all blocks, from b.amax.
  const bool four_over_six = S == ScaleKind::two_level && job.spec().four_over_six != FourOverSix::off;
  if (four_over_six) {
    if constexpr (S == ScaleKind::two_level) row_four_over_six(job, v, b);
  } else if (job.spec().row_scaled) {
    for (int64_t r = 0; r < v.rows; ++r) {
      const int64_t at = b.first_of(r);
      block_scales<S>(job.rule(v.row + r), b.amax + at, b.per_line, b.stored + at, b.multiplier + at);
    }
  } else {
    block_scales<S>(job.rule(0), b.amax, b.count(v.rows), b.stored, b.multiplier);
  }
  // Scales of lost blocks become NaN. Their multipliers, and so their codes, stay as they are.
  lost.apply(b.count(v.rows), b.stored);
  // To memory: as columns where blocks lead, as runs where those of a line are contiguous, else one by one.
  auto* to = static_cast<Stored<S>*>(job.side.scale);
  const int64_t block = v.col / block_of(S);
  const bool contiguous = S != ScaleKind::f32 && !job.spec().swizzled;
  if (S == ScaleKind::f32 && !job.spec().square) {
    for (int64_t i = 0; i < b.per_line; ++i) {
      Stored<S>* column = to + job.scale_at(v.row, block + i);
      for (int64_t r = 0; r < v.rows; ++r) column[r] = b.stored[b.first_of(r) + i];
    }
    return;
  }
  for (int64_t r = 0; r < v.rows; ++r) {
    const Stored<S>* stored = b.stored + b.first_of(r);
    if (contiguous)
      std::memcpy(to + job.scale_at(v.row + r, block), stored, static_cast<size_t>(b.per_line));
    else
      for (int64_t i = 0; i < b.per_line; ++i) to[job.scale_at(v.row + r, block + i)] = stored[i];
  }
}

/// Random bytes of the elements of as many lines from `first` on as kPieceOfLine holds; returns how many.
template <DType D>
int64_t draw_lines(const Job& job, const Values<D>& v, int64_t first, uint8_t* bytes) {
  constexpr int64_t most = kPieceOfLine / kNvfp4Block;
  const int64_t per_line = round_up(v.cols, kQuad) / kNvfp4Block, lines = std::min(most / per_line, v.rows - first);
  alignas(64) uint64_t numbers[most + kDraws] = {};
  for (int64_t i = 0; i < lines; ++i)
    job.block_numbers_along(v.row + first + i, v.col / kNvfp4Block, per_line, numbers + i * per_line);
  draw_blocks({job.problem.random.seed, job.offset}, numbers, lines * per_line, bytes);
  return lines;
}

/// Encodes lines whose multipliers are known and whose elements are all finite, or else with kNan.
template <Format F, ScaleKind S, bool kNan, DType D>
class LineEncoder {
 public:
  /// Multipliers of `count` blocks, or of all elements if count is 0. They are read up to a whole vector.
  void prepare(const float* multiplier, int64_t count) {
    multiplier_ = multiplier;
    if constexpr (!kWords) return;
    powers_ = S == ScaleKind::e8m0 || are_powers(multiplier, std::max(count, int64_t{1}));
    if (count == 0) find_limits(broadcast(*multiplier), limits_);
    for (int64_t i = 0; i < count; i += kLanes) find_limits(load(multiplier + i), limits_ + i);
  }

  /// Codes of whole quads from block `first` on, whose blocks have N elements, or from any element if N is 0.
  template <int64_t N>
  void encode(const Plain<D>* x, int64_t first, int64_t count, const Sink<uint8_t>& out) const {
    const float* m = multiplier_ + first;
    if constexpr (!kWords)
      encode_line<F, kNan, N, D>(x, m, count, out);
    else if (S == ScaleKind::e8m0 || powers_)
      encode_line_of_words<F, true>(x, BlockFactors<N>{m, limits_ + first}, count, out);
    else if constexpr (S != ScaleKind::e8m0)
      encode_line_of_words<F, false>(x, BlockFactors<N>{m, limits_ + first}, count, out);
  }

 private:
  static constexpr bool kWords = D == DType::bf16 && !kNan && !row(F).packed();

  void find_limits(F32 multiplier, uint32_t* to) const {
    *reinterpret_cast<U32*>(to) = word_limits<F>(multiplier, powers_);
  }

  const float* multiplier_ = nullptr;
  bool powers_ = false;
  alignas(64) uint32_t limits_[kWords ? BlockNumbers<S>::kMost : 1];
};

/// Codes of all lines, and a byte of each in `kept` if that is not null. Not inlined: quantize_rows() would hold the
/// loop twice.
template <Format F, ScaleKind S, bool kNan, DType D>
[[gnu::noinline]] void encode_rows(const Job& job, const Values<D>& v, const BlockNumbers<S>& b,
                                   uint8_t (*kept)[kTile]) {
  const int64_t padded = round_up(v.cols, kQuad), bytes = row(F).packed() ? ceil_div(v.cols, 2) : v.cols;
  const bool stochastic = S == ScaleKind::two_level && job.spec().stochastic;
  // Multipliers are those of blocks, prepared once for all lines, or one for each line.
  alignas(64) uint8_t random[kPieceOfLine], memory[kPieceOfLine];
  int64_t drawn = 0, from = 0;  // random bytes are those of lines [from, drawn)
  const bool by_blocks = job.multipliers() == 0;
  LineEncoder<F, S, kNan, D> encoder;
  if (by_blocks) encoder.prepare(b.multiplier, b.count(v.rows));
  for (int64_t r = 0; r < v.rows; ++r) {
    // Beside each line: other work of the tile, and random bytes when those drawn are used up.
    v.meanwhile.at_row(r);
    if (stochastic && r == drawn) drawn += draw_lines(job, v, from = r, random);
    uint8_t *codes = kept ? kept[r] : memory, *to = job.code_at(v.row + r, v.col);
    // bfloat16 to packed codes has an encoder that packs at once.
    if constexpr (row(F).packed() && D == DType::bf16) {
      if (!stochastic && !kept) {
        const float* multiplier = b.multiplier + b.first_of(r);
        encode_packed_line<kNan, block_of(S)>(v.line(r), multiplier, round_up(v.cols, kPackedGroup), memory);
        put(memory, bytes, to, job.streams);
        continue;
      }
    }
    // Whole quads go where they belong at once, unless they are kept or packed first.
    const bool direct = !row(F).packed() && !kept && padded == v.cols && reinterpret_cast<uintptr_t>(to) % 64 == 0;
    const Sink<uint8_t> out{direct ? to : codes, direct && job.streams, v.meanwhile.one_line};
    // Codes, a byte each, by the one encoder that fits.
    if (!by_blocks) {
      encoder.prepare(job.given(v.row + r), 0);
      encoder.template encode<0>(v.line(r), 0, padded, out);
    } else if (stochastic) {
      encode_line_stochastic<kNan, D>(v.line(r), b.multiplier + b.first_of(r), padded, random + (r - from) * padded,
                                      codes);
    } else {
      encoder.template encode<block_of(S)>(v.line(r), b.first_of(r), padded, out);
    }
    // What was not written directly: packed if it has to be, then put in place.
    if (direct) continue;
    if constexpr (row(F).packed()) pack_codes(std::exchange(codes, memory), padded, memory);
    put(codes, bytes, to, job.streams);
  }
}

/// Whether a multiplier of lines from `line` on, known before their blocks, is no ordinary number: then it may make NaN
/// of what is none, or change signs.
inline bool makes_nan(const Job& job, int64_t line, int64_t count) {
  if (job.multipliers() == 0) return false;
  bool ordinary = true;
  for (int64_t i = 0; i < (job.multipliers() == 1 ? 1 : count); ++i) {
    const float given = *job.given(line + i);
    ordinary &= is_finite(given) && given > 0;
  }
  return !ordinary;
}

/// Scales and codes of some lines, or of the piece of one; returns their amax. The numbers of their blocks are left in
/// `b`, and codes, a byte each, in `kept` if that is not null.
template <Format F, ScaleKind S, DType D>
float quantize_rows(const Job& job, const Values<D>& v, BlockNumbers<S>& b, uint8_t (*kept)[kTile]) {
  // Amaxes of blocks. A NaN shows as more than infinity, so that ordinary tiles are searched once.
  b.per_line = ceil_div(v.cols, block_of(S));
  b.height = job.spec().square ? block_of(S) : 1;
  const float* given = job.given(v.row);
  const auto amaxes = [&](auto nan) { return given ? rows_magnitude<D, nan>(v) : row_block_amaxes<S, D, nan>(v, b); };
  Bits<D> all = amaxes(std::false_type{});
  const bool nan = all > kInfinity<D>, nonfinite = all >= kInfinity<D>;
  // Not finite: note the lost blocks while their amaxes show it, then search again without NaN.
  LostRowBlocks<S> lost;
  if (nonfinite && !given && job.spec().nan) lost.find(b.amax, b.count(v.rows));
  if (nan) all = amaxes(std::true_type{});
  // Scales, then codes. Only elements that may be NaN take the slower encoder.
  if (!given) row_scales<S, D>(job, v, lost, b);
  if (nonfinite || makes_nan(job, v.row, v.rows))
    encode_rows<F, S, true, D>(job, v, b, kept);
  else
    encode_rows<F, S, false, D>(job, v, b, kept);
  return magnitude_value<D>(all);
}

template <Format F, ScaleKind S, DType D>
float quantize_rows(const Job& job, const Values<D>& v) {
  BlockNumbers<S> b;
  return quantize_rows<F, S, D>(job, v, b, nullptr);
}
