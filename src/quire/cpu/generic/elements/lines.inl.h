// Lines of a matrix as float32: plain memory in and out, and the transpose from rows to columns.
#pragma once

#include "quire/cpu/generic/elements/plain.inl.h"

/// Tiles are at most this many rows and columns; a multiple of every block length.
constexpr int64_t kTile = 128;
/// Floats from one line of a tile to the next: not a power of two, so that a column of a tile does not share cache
/// sets.
constexpr int64_t kLineStride = kTile + 16;
/// Least number of elements worth a task of their own.
constexpr int64_t kGrain = int64_t{1} << 15;

/// 64-byte aligned floats, not initialised: for sizes that follow from the problem (ThreadMemory is for others).
class Scratch {
 public:
  explicit Scratch(int64_t count) {
    if (count > 0)
      floats_.reset(static_cast<float*>(::operator new(sizeof(float) * static_cast<size_t>(count), kAlignment)));
  }
  float* get() const { return floats_.get(); }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct FreeScratch {
    void operator()(float* p) const { ::operator delete(p, kAlignment); }
  };
  std::unique_ptr<float, FreeScratch> floats_;
};

inline const void* element_of(const Matrix& x, int64_t r, int64_t c) {
  return static_cast<const char*>(x.data) + (r * x.row_stride + c) * size_of(x.dtype);
}

/// Exact widening of whole vectors.
template <DType D>
inline void read_whole(const Plain<D>* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += kLanes) store(to + i, load_as<D>(from + i));
}

template <DType D>
void read_as(const Plain<D>* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load_as<D>(from + i));
  for (; i < count; ++i) to[i] = widen<D>(from[i]);
}

/// Exact widening of count elements.
inline void read_line(DType dtype, const void* from, int64_t count, float* to) {
  with_dtype(dtype, [&](auto d) { read_as<d>(static_cast<const Plain<d>*>(from), count, to); });
}

template <DType D>
void write_as(const float* from, int64_t count, Plain<D>* to) {
  int64_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes)
    store_as<D, Known::nothing>(to + i, load(from + i), load(from + i + kLanes));
  for (; i + kLanes <= count; i += kLanes) store_as<D>(to + i, load(from + i));
  if (i == count) return;
  float rest[kLanes] = {};
  Plain<D> last[kLanes];
  std::copy(from + i, from + count, rest);
  store_as<D>(last, load(rest));
  std::copy_n(last, count - i, to + i);
}

/// Rounds count elements to dtype, to nearest even.
inline void write_line(DType dtype, const float* from, int64_t count, void* to) {
  with_dtype(dtype, [&](auto d) { write_as<d>(from, count, static_cast<Plain<d>*>(to)); });
}

/// Rounds a line of at most kCount float32 numbers to dtype.
template <int64_t kCount>
inline void round_line(DType dtype, int64_t count, float* line) {
  if (dtype == DType::f32) return;
  uint16_t rounded[kCount];
  write_line(dtype, line, count, rounded);
  read_line(dtype, rounded, count, line);
}

/// A tile of x: rows [row, row + rows) and columns [col, col + cols).
struct Tile {
  int64_t row, col, rows, cols;
};

/// Tile t of x, cut into bands of `rows` rows and these into pieces of `cols` columns.
inline Tile tile_at(const Matrix& x, int64_t rows, int64_t cols, int64_t t) {
  const int64_t pieces = ceil_div(x.cols, cols);
  const int64_t row = t / pieces * rows, col = t % pieces * cols;
  return {row, col, std::min(rows, x.rows - row), std::min(cols, x.cols - col)};
}

/// Asks for memory that is needed soon: more rows are open at once than a processor foresees by itself.
inline void prefetch(const void* from, int64_t bytes) {
  constexpr int64_t kCacheLine = 64;
  for (int64_t i = 0; i < bytes; i += kCacheLine) __builtin_prefetch(static_cast<const char*>(from) + i, 0, 2);
}

/// Asks for memory that a loop over a line will read next but some: processors stop foreseeing at the end of a page.
inline void ask_ahead(const uint8_t* from) {
  constexpr int64_t kAhead = 4096;
  __builtin_prefetch(from + kAhead);
}

/// One stage of a transposition: exchanges the off-diagonal quarters of every 2 x 2 block of S x S lanes.
template <int S, int... I>
inline void exchange(F32& a, F32& b, std::integer_sequence<int, I...>) {
  const I32 upper = {(I & S ? I - S + kLanes : I)...};
  const I32 lower = {(I & S ? I + kLanes : I + S)...};
  const F32 top = __builtin_shuffle(a, b, upper);
  b = __builtin_shuffle(a, b, lower);
  a = top;
}

template <int S = 1>
inline void transpose(F32 (&v)[kLanes]) {
  for (int i = 0; i < kLanes; ++i)
    if (!(i & S)) exchange<S>(v[i], v[i + S], std::make_integer_sequence<int, kLanes>());
  if constexpr (2 * S < kLanes) transpose<2 * S>(v);
}

/// Rows are transposed into columns, and transformed, in groups of as many as the transform takes.
constexpr int64_t kGroupRows = kHadamardSize;

/// columns[c * kLineStride + r] = rows[r * kLineStride + c] for 16 rows and `count` columns, rounded up to kLanes.
[[gnu::flatten]] inline void transpose_and_transform(const float* rows, int64_t count, float* columns) {
  for (int64_t r = 0; r < kGroupRows; r += kLanes)
    for (int64_t c = 0; c < count; c += kLanes) {
      alignas(64) F32 v[kLanes];
      for (int i = 0; i < kLanes; ++i) v[i] = load(rows + (r + i) * kLineStride + c);
      transpose(v);
      for (int i = 0; i < kLanes; ++i) store(columns + (c + i) * kLineStride + r, v[i]);
    }
}
