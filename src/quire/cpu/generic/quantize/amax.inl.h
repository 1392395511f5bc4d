// Largest magnitudes, NaN ignored (numerics.md 0.2). Compared as integers: for non-negative floats the order is the
// same, and integer maxima are exact in any order. NaN is above infinity there, so a largest magnitude up to infinity
// says that no NaN was seen; only where there was one is the search done again without them.
#pragma once

#include "quire/cpu/generic/elements/lines.inl.h"
#include "quire/cpu/generic/elements/plain.inl.h"
#include "quire/cpu/generic/elements/vectors.inl.h"

/// Element bits of one input type as integers.
template <DType D>
using Bits = std::conditional_t<D == DType::f32, int32_t, int16_t>;
/// Elements of as much memory as a vector holds.
template <DType D>
constexpr int64_t kWidth = 4 * kLanes / static_cast<int64_t>(sizeof(Bits<D>));

template <DType D>
constexpr Bits<D> kInfinity = D == DType::f32    ? 0x7F800000
                              : D == DType::bf16 ? 0x7F80
                                                 : 0x7C00;

/// Magnitudes of the elements; without kNan, those of NaN are above infinity, with it they are 0.
template <DType D, int64_t N, bool kNan>
inline Vec<Bits<D>, N> magnitudes(const Plain<D>* x) {
  using V = Vec<Bits<D>, N>;
  const V m = *reinterpret_cast<const V*>(x) & std::numeric_limits<Bits<D>>::max();
  if constexpr (kNan) return m > kInfinity<D> ? V{} : m;
  return m;
}

template <class V, int... I>
inline auto lower_half(V v, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(v, v, I...);
}
template <class V, int... I>
inline auto upper_half(V v, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(v, v, (I + static_cast<int>(sizeof...(I)))...);
}

/// The largest lane; none is negative.
template <class T, int64_t N>
inline T largest(Vec<T, N> v) {
  constexpr auto half = std::make_integer_sequence<int, N / 2>();
  if constexpr (N * sizeof(T) == 16)
    return largest_lane(v);
  else
    return largest<T, N / 2>(larger<Vec<T, N / 2>>(lower_half(v, half), upper_half(v, half)));
}

/// The largest magnitude of N elements, a power of two not below 16 bytes.
template <DType D, int64_t N, bool kNan>
inline Bits<D> block_magnitude(const Plain<D>* x) {
  constexpr int64_t width = std::min(N, kWidth<D>);
  Vec<Bits<D>, width> m = magnitudes<D, width, kNan>(x);
  for (int64_t i = width; i < N; i += width) m = larger(m, magnitudes<D, width, kNan>(x + i));
  return largest<Bits<D>, width>(m);
}

/// Element j of every 16 bytes: the largest of those that vector j has there; of the kPart vectors, those kStride
/// apart.
template <int kPart, int kStride, class T, int64_t N>
inline Vec<T, N> largest_of_parts(const Vec<T, N>* v) {
  constexpr auto all = std::make_integer_sequence<int, N>();
  if constexpr (kStride == kPart) {
    return *v;
  } else {
    const Vec<T, N> a = largest_of_parts<kPart, 2 * kStride, T, N>(v);
    const Vec<T, N> b = largest_of_parts<kPart, 2 * kStride, T, N>(v + kStride);
    return larger(interleaved_parts<kPart, 0>(a, b, all), interleaved_parts<kPart, kPart / 2>(a, b, all));
  }
}

/// Parts kNth of every kParts parts of kPart elements; the elements of different parts that remain, in alternation.
template <int kPart, int kParts, int kNth, class V, int... I>
inline auto nth_parts(V v, std::integer_sequence<int, I...>) {
  constexpr int remaining = static_cast<int>(sizeof...(I)) / kPart;
  return __builtin_shufflevector(v, v, ((I % remaining * kParts + kNth) * kPart + I / remaining)...);
}

/// The largest of kParts neighbouring parts each.
template <int kPart, int kParts, int kNth, class T, int64_t N>
inline auto largest_of_neighbours(Vec<T, N> v) {
  constexpr auto kept = std::make_integer_sequence<int, N / kParts>();
  const Vec<T, N / kParts> part = nth_parts<kPart, kParts, kNth>(v, kept);
  if constexpr (kNth + 1 == kParts)
    return part;
  else
    return larger<Vec<T, N / kParts>>(part, largest_of_neighbours<kPart, kParts, kNth + 1, T, N>(v));
}

/// The largest magnitudes of blocks of N elements: of as many at once as lie in kPart vectors of kWide elements, so
/// that a vector of them results without a search in each.
template <DType D, int64_t N, int64_t kWide, bool kNan>
inline void block_magnitudes(const Plain<D>* x, int64_t blocks, Bits<D>* found) {
  constexpr int part = 16 / sizeof(Bits<D>);
  constexpr int64_t width = std::min(N, kWide), elements = std::max(N, kWide), results = part * elements / N;
  using V = Vec<Bits<D>, kWide>;
  for (int64_t i = 0; i < blocks; i += results) {
    // As many vectors as 16 bytes have elements. If a block is longer than a vector, the largest of its vectors.
    V v[part];
#pragma GCC unroll 8
    for (int j = 0; j < part; ++j) {
      const Plain<D>* at = x + i * N + j * elements;
      v[j] = magnitudes<D, kWide, kNan>(at);
#pragma GCC unroll 8
      for (int64_t k = kWide; k < N; k += kWide) v[j] = larger(v[j], magnitudes<D, kWide, kNan>(at + k));
    }
    // Transpose and compare in one step: element j of every 16 bytes is the largest that vector j has there.
    const V all = largest_of_parts<part, 1, Bits<D>, kWide>(v);
    *reinterpret_cast<Vec<Bits<D>, results>*>(found + i) =
        largest_of_neighbours<part, static_cast<int>(width) / part, 0, Bits<D>, kWide>(all);
  }
}

template <DType D, bool kNan>
inline Bits<D> line_magnitude(const Plain<D>* x, int64_t count) {
  constexpr int64_t width = kWidth<D>;
  Vec<Bits<D>, width> m[4] = {};
  int64_t i = 0;
  for (; i + 4 * width <= count; i += 4 * width)
    for (int q = 0; q < 4; ++q) m[q] = larger(m[q], magnitudes<D, width, kNan>(x + i + q * width));
  Bits<D> found = largest<Bits<D>, width>(larger(larger(m[0], m[1]), larger(m[2], m[3])));
  for (; i < count; ++i) {
    const auto a = static_cast<Bits<D>>(std::bit_cast<Bits<D>>(x[i]) & std::numeric_limits<Bits<D>>::max());
    found = std::max(found, kNan && a > kInfinity<D> ? Bits<D>{} : a);
  }
  return found;
}

/// Magnitude bits as the float they are.
template <DType D>
inline float magnitude_value(Bits<D> bits) {
  return widen<D>(std::bit_cast<Plain<D>>(bits));
}

template <DType D>
inline float line_amax(const Plain<D>* x, int64_t count) {
  Bits<D> bits = line_magnitude<D, false>(x, count);
  if (bits > kInfinity<D>) bits = line_magnitude<D, true>(x, count);
  return magnitude_value<D>(bits);
}

/// amax of row r of x.
inline float row_amax(const Matrix& x, int64_t r) {
  float amax = 0;
  with_dtype(x.dtype, [&](auto d) { amax = line_amax<d>(static_cast<const Plain<d>*>(element_of(x, r, 0)), x.cols); });
  return amax;
}

/// amax[r] of every row of x.
void row_amaxes(const Matrix& x, float* amax) {
  parallel_for(x.rows, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, x.cols)), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) amax[r] = row_amax(x, r);
  });
}

/// A maximum that several threads contribute to; of floats that are not negative.
class SharedMaximum {
 public:
  void add(float value) {
    const auto bits = std::bit_cast<int32_t>(value);
    int32_t seen = bits_.load(std::memory_order_relaxed);
    while (seen < bits && !bits_.compare_exchange_weak(seen, bits, std::memory_order_relaxed)) continue;
  }
  float value() const { return std::bit_cast<float>(bits_.load(std::memory_order_relaxed)); }

 private:
  std::atomic<int32_t> bits_{0};
};

/// amax of all of x.
float tensor_amax(const Matrix& x) {
  if (x.cols == 0) return 0;  // such rows have no memory, and may be more than a loop ever counts
  SharedMaximum found;
  parallel_for(x.rows, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, x.cols)), [&](int64_t begin, int64_t end) {
    float amax = 0;
    for (int64_t r = begin; r < end; ++r) amax = std::max(amax, row_amax(x, r));
    found.add(amax);
  });
  return found.value();
}

/// found[i] = the largest magnitude of column i of `rows` rows. count is a multiple of the vector's elements. Four rows
/// at a time, because each time all maxima are read and written.
template <DType D, bool kNan>
inline void column_magnitudes(const Plain<D>* x, int64_t stride, int64_t rows, int64_t count, Bits<D>* found) {
  constexpr int64_t width = kWidth<D>;
  using V = Vec<Bits<D>, width>;
  std::fill_n(found, count, Bits<D>{});
  for (int64_t r = 0; r < rows; r += 4) {
    // Rows beyond the last one are the last one again, whose magnitudes count but once.
    const Plain<D>* line[4];
    for (int64_t i = 0; i < 4; ++i) line[i] = x + std::min(r + i, rows - 1) * stride;
    for (int64_t c = 0; c < count; c += width) {
      V m = *reinterpret_cast<const V*>(found + c);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) m = larger(m, magnitudes<D, width, kNan>(line[i] + c));
      *reinterpret_cast<V*>(found + c) = m;
    }
  }
}

/// amax[c] of every column of x.
void column_amaxes(const Matrix& x, float* amax) {
  constexpr int64_t kStrip = 256;
  parallel_for(ceil_div(x.cols, kStrip), 1, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s)
      with_dtype(x.dtype, [&](auto d) {
        const int64_t first = s * kStrip, count = std::min(kStrip, x.cols - first);
        alignas(64) Bits<d> found[kStrip] = {};
        for (int64_t r = 0; r < x.rows; ++r) {
          const auto* line = static_cast<const Plain<d>*>(element_of(x, r, first));
          for (int64_t c = 0; c < count; ++c) {
            const auto a = static_cast<Bits<d>>(std::bit_cast<Bits<d>>(line[c]) & std::numeric_limits<Bits<d>>::max());
            found[c] = std::max(found[c], a > kInfinity<d> ? Bits<d>{} : a);
          }
        }
        for (int64_t c = 0; c < count; ++c) amax[first + c] = magnitude_value<d>(found[c]);
      });
  });
}
