// Lines of a matrix as float32: plain memory in and out, and the turn from rows to columns.

/// Tiles are at most this many rows and columns; a multiple of every block length.
constexpr int64_t kTile = 128;
/// Floats from one line of a tile to the next: not a power of two, so that a column of a tile does not share cache
/// sets.
constexpr int64_t kLineStride = kTile + 16;
/// Least number of elements worth a task of their own.
constexpr int64_t kGrain = int64_t{1} << 15;

/// 64-byte aligned floats, not initialised.
class Scratch {
 public:
  explicit Scratch(int64_t count)
      : floats_(static_cast<float*>(::operator new(sizeof(float) * static_cast<size_t>(count), kAlignment))) {}
  float* get() const { return floats_.get(); }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(float* p) const { ::operator delete(p, kAlignment); }
  };
  std::unique_ptr<float, Free> floats_;
};

inline const void* element_of(const Matrix& x, int64_t r, int64_t c) {
  return static_cast<const char*>(x.data) + (r * x.row_stride + c) * size_of(x.dtype);
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

/// Rows of the tile in float32, one per kLineStride, +0 up to kTile columns: what a partial block lacks counts as +0
/// (numerics.md 0.12).
inline void load_rows(const Matrix& x, const Tile& tile, float* lines) {
  for (int64_t r = 0; r < tile.rows; ++r) {
    float* line = lines + r * kLineStride;
    prefetch(element_of(x, tile.row + r, tile.col + tile.cols), tile.cols * size_of(x.dtype));
    read_line(x.dtype, element_of(x, tile.row + r, tile.col), tile.cols, line);
    std::fill(line + tile.cols, line + kTile, 0.0f);
  }
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

/// Transforms kLanes columns of 16 rows in place, rounded to bfloat16 (numerics.md 0.10).
[[gnu::flatten]] inline void hadamard_columns(float* rows, bool signs) {
  alignas(64) F32 v[kHadamardSize];
  for (int i = 0; i < kHadamardSize; ++i) v[i] = load(rows + i * kLineStride);
  hadamard16(v, signs);
  for (int i = 0; i < kHadamardSize; ++i) {
    uint16_t rounded[kLanes];
    store_bf16(rounded, v[i]);
    store(rows + i * kLineStride, load_bf16(rounded));
  }
}

/// Rows are turned into columns, and transformed, in groups of as many as the transform takes.
constexpr int64_t kGroupRows = kHadamardSize;

/// A group: up to 16 rows of x, the missing ones +0, transformed if asked.
inline void load_group(const Matrix& x, const Tile& group, Hadamard hadamard, float* rows) {
  load_rows(x, group, rows);
  for (int64_t r = group.rows; r < kGroupRows; ++r) std::fill_n(rows + r * kLineStride, kTile, 0.0f);
  if (hadamard == Hadamard::off) return;
  for (int64_t c = 0; c < group.cols; c += kLanes) hadamard_columns(rows + c, hadamard == Hadamard::signs);
}

/// columns[c * kLineStride + r] = rows[r * kLineStride + c] for 16 rows and `count` columns, rounded up to kLanes.
[[gnu::flatten]] inline void turn(const float* rows, int64_t count, float* columns) {
  for (int64_t r = 0; r < kGroupRows; r += kLanes)
    for (int64_t c = 0; c < count; c += kLanes) {
      alignas(64) F32 v[kLanes];
      for (int i = 0; i < kLanes; ++i) v[i] = load(rows + (r + i) * kLineStride + c);
      transpose(v);
      for (int i = 0; i < kLanes; ++i) store(columns + (c + i) * kLineStride + r, v[i]);
    }
}

/// Columns of the tile, padded like its rows; with a transform, transformed (numerics.md 5.3).
inline void load_columns(const Matrix& x, const Tile& tile, Hadamard hadamard, float* columns) {
  alignas(64) float rows[kGroupRows * kLineStride];
  for (int64_t r = 0; r < tile.rows; r += kGroupRows) {
    load_group(x, {tile.row + r, tile.col, std::min(kGroupRows, tile.rows - r), tile.cols}, hadamard, rows);
    turn(rows, tile.cols, columns + r);
  }
  const int64_t filled = round_up(tile.rows, kGroupRows);
  for (int64_t c = 0; c < tile.cols; ++c) std::fill_n(columns + c * kLineStride + filled, kTile - filled, 0.0f);
}
