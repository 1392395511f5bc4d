// Largest magnitudes, NaN ignored (numerics.md 0.2). Compared as integers: for non-negative floats the order is the
// same, and integer maxima are exact in any order.

/// Element bits of one input type as integers: T is int16_t (f16, bf16) or int32_t (f32).
template <class T>
inline T magnitude(T bits, T infinity) {
  const T a = static_cast<T>(bits & std::numeric_limits<T>::max());
  return a > infinity ? T{0} : a;
}

/// largest[i] = max over rows of column i.
template <class T>
void column_magnitudes(const Matrix& x, int64_t first, int64_t count, T infinity, T* largest) {
  std::fill_n(largest, count, T{0});
  for (int64_t r = 0; r < x.rows; ++r) {
    const T* line = static_cast<const T*>(x.data) + r * x.row_stride + first;
    for (int64_t i = 0; i < count; ++i) largest[i] = std::max(largest[i], magnitude(line[i], infinity));
  }
}

template <class T>
T line_magnitude(const void* data, int64_t count, T infinity) {
  const T* line = static_cast<const T*>(data);
  T largest = 0;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, magnitude(line[i], infinity));
  return largest;
}

constexpr int32_t kInfinity32 = 0x7F800000;
constexpr int16_t infinity16(DType t) { return t == DType::bf16 ? 0x7F80 : 0x7C00; }

/// amax of row r of x.
inline float row_amax(const Matrix& x, int64_t r) {
  const void* line = element_of(x, r, 0);
  if (x.dtype == DType::f32) return std::bit_cast<float>(line_magnitude(line, x.cols, kInfinity32));
  const int16_t bits = line_magnitude(line, x.cols, infinity16(x.dtype));
  float amax;
  read_line(x.dtype, &bits, 1, &amax);
  return amax;
}

/// amax[r] of every row of x.
void row_amaxes(const Matrix& x, float* amax) {
  parallel_for(x.rows, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, x.cols)), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) amax[r] = row_amax(x, r);
  });
}

/// amax[c] of every column of x.
void column_amaxes(const Matrix& x, float* amax) {
  constexpr int64_t kStrip = 256;
  parallel_for(ceil_div(x.cols, kStrip), 1, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin * kStrip; c < std::min(end * kStrip, x.cols); c += kStrip) {
      const int64_t count = std::min(kStrip, x.cols - c);
      alignas(64) int32_t bits[kStrip];
      if (x.dtype == DType::f32) {
        column_magnitudes(x, c, count, kInfinity32, bits);
        read_line(x.dtype, bits, count, amax + c);
      } else {
        alignas(64) int16_t bits16[kStrip];
        column_magnitudes(x, c, count, infinity16(x.dtype), bits16);
        read_line(x.dtype, bits16, count, amax + c);
      }
    }
  });
}

float largest_of(const std::vector<float>& amaxes) {
  return std::bit_cast<float>(line_magnitude(amaxes.data(), std::ssize(amaxes), kInfinity32));
}

/// amax of all of x.
float tensor_amax(const Matrix& x) {
  std::vector<float> rows(static_cast<size_t>(x.rows));
  row_amaxes(x, rows.data());
  return largest_of(rows);
}

/// amax of all 16-token Hadamard transforms of x's columns (numerics.md 5.2).
float hadamard_amax(const Matrix& x, Hadamard hadamard) {
  const int64_t groups = ceil_div(x.rows, kGroupRows) * ceil_div(x.cols, kTile);
  std::vector<float> amaxes(static_cast<size_t>(groups));
  parallel_for(groups, kGrain / (kGroupRows * kTile), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      alignas(64) float rows[kGroupRows * kLineStride];
      load_group(x, tile_at(x, kGroupRows, kTile, t), hadamard, rows);
      int32_t largest = 0;
      for (int64_t r = 0; r < kGroupRows; ++r)
        largest = std::max(largest, line_magnitude(rows + r * kLineStride, kTile, kInfinity32));
      amaxes[static_cast<size_t>(t)] = std::bit_cast<float>(largest);
    }
  });
  return largest_of(amaxes);
}
