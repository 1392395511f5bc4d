// Deterministic matrices of every dtype that find what ordinary numbers would not.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string_view>

#include "here.h"
#include "quire/base/matrix.h"
#include "quire/format/element.h"

namespace quire::testing {

/// SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = (state_ += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  uint64_t below(uint64_t n) { return next() % n; }
  /// In [0, 1).
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }
  /// Roughly normal: mean 0, variance 1.
  double normal() {
    double sum = -6;
    for (int i = 0; i < 12; ++i) sum += uniform();
    return sum;
  }

 private:
  uint64_t state_;
};

enum class Kind {
  normal,    ///< like activations
  wide,      ///< any finite bit pattern, subnormals included
  special,   ///< normal with NaN of both signs, infinities, zeros of both signs and subnormals
  ties,      ///< multiples of 1/16: on and halfway between points of coarse grids
  outliers,  ///< mostly tiny or zero, rarely large
  huge,      ///< near the largest finite value
  zeros,     ///< zeros of both signs
  nans,      ///< nothing but NaN
};
inline constexpr std::array<std::string_view, 8> kKindNames{"normal",   "wide", "special", "ties",
                                                            "outliers", "huge", "zeros",   "nans"};

inline float special_value(Random& r, DType dtype) {
  const float tiny = dtype == DType::f16 ? 0x1p-24f : dtype == DType::bf16 ? 0x1p-133f : 0x1p-149f;
  const float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  const std::array<float, 8> values{infinity, -infinity, nan, -nan, 0.0f, -0.0f, 3 * tiny, -largest_finite(dtype)};
  return values[r.below(values.size())];
}

inline float wide_value(Random& r, DType dtype) {
  float x = std::numeric_limits<float>::infinity();
  while (!std::isfinite(x)) {
    const uint64_t bits = r.next();
    x = dtype == DType::f32 ? std::bit_cast<float>(static_cast<uint32_t>(bits)) : load_element(&bits, dtype, 0);
  }
  return x;
}

inline float value_of(Random& r, Kind kind, DType dtype) {
  switch (kind) {
    case Kind::wide:
      return wide_value(r, dtype);
    case Kind::special:
      return r.below(5) == 0 ? special_value(r, dtype) : static_cast<float>(r.normal());
    case Kind::ties:
      return static_cast<float>(static_cast<int64_t>(r.below(257)) - 128) * 0.0625f;
    case Kind::outliers:
      return static_cast<float>(r.normal()) * (r.below(50) == 0 ? 1000.0f : r.below(3) == 0 ? 0.0f : 1e-4f);
    case Kind::huge:
      return largest_finite(dtype) * static_cast<float>(1 - 0.5 * r.uniform()) * (r.below(2) ? 1.0f : -1.0f);
    case Kind::zeros:
      return r.below(2) ? 0.0f : -0.0f;
    case Kind::nans:
      return std::bit_cast<float>(r.below(2) ? 0x7FC00000u : 0xFFC00000u);
    default:
      return static_cast<float>(r.normal());
  }
}

struct InputShape {
  int64_t rows, cols;
  int64_t padding = 0;  ///< elements between rows
  int64_t lead = 0;     ///< elements before the first row, so that rows need not be aligned
};

/// A matrix with memory of its own. Elements that do not belong to it are infinite, so that reading one shows.
class Input {
 public:
  Input(InputShape shape, DType dtype, Kind kind, uint64_t seed)
      : memory_(static_cast<size_t>((shape.lead + shape.rows * (shape.cols + shape.padding) + 1) * size_of(dtype))),
        shape_(shape),
        dtype_(dtype) {
    Random r(seed);
    const int64_t count = static_cast<int64_t>(memory_.size()) / size_of(dtype);
    for (int64_t i = 0; i < count; ++i) store_element(memory_.data(), dtype, i, std::numeric_limits<float>::infinity());
    for (int64_t i = 0; i < shape.rows; ++i)
      for (int64_t j = 0; j < shape.cols; ++j)
        store_element(memory_.data(), dtype, shape.lead + i * stride() + j, value_of(r, kind, dtype));
  }

  int64_t stride() const { return shape_.cols + shape_.padding; }
  operator Matrix() const {
    return {memory_.data() + shape_.lead * size_of(dtype_), dtype_, shape_.rows, shape_.cols, stride()};
  }

 private:
  Array<uint8_t> memory_;
  InputShape shape_;
  DType dtype_;
};

inline constexpr std::array<DType, 3> kFloatTypes{DType::f32, DType::f16, DType::bf16};

}  // namespace quire::testing
