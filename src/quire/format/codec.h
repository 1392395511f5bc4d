// Decode and encode any format row: slow, constexpr, obviously right. The oracle of every faster conversion.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "quire/format/format.h"

namespace quire {

/// 2^e as a double, for any e a format or a float32 can produce.
constexpr double power_of_two(int e) { return std::bit_cast<double>(static_cast<uint64_t>(e + 1023) << 52); }

/// The value of one code. Exact: every value of every row is a float32.
constexpr float decode(const FormatRow& f, int code) {
  const int magnitude = code & (f.magnitudes() - 1);
  const bool negative = f.is_signed && (code >> (f.exp_bits + f.man_bits)) != 0;
  const double sign = negative ? -1.0 : 1.0;
  if (magnitude > f.max_code()) {
    const bool infinite = f.specials == Specials::ieee && magnitude == f.max_code() + 1;
    return infinite ? static_cast<float>(sign) * std::numeric_limits<float>::infinity()
                    : std::numeric_limits<float>::quiet_NaN();
  }
  const int exponent = magnitude >> f.man_bits;
  const int mantissa = magnitude & ((1 << f.man_bits) - 1);
  // A format without a mantissa (E8M0) has no subnormals: exponent 0 is an ordinary power of two.
  const bool subnormal = exponent == 0 && f.man_bits > 0;
  const double unit = power_of_two((subnormal ? 1 : exponent) - f.bias - f.man_bits);
  return static_cast<float>(sign * unit * (mantissa + (subnormal ? 0 : 1 << f.man_bits)));
}

constexpr float decode(Format f, int code) { return decode(row(f), code); }

/// Round to nearest, ties to even, saturating; NaN gives nan_code(), signed zero keeps its sign (numerics.md 1.1, 1.2).
/// Signed formats only; scales of E8M0 have their own rule (spec/scale.h).
constexpr int encode(const FormatRow& f, float x) {
  if (x != x) return f.nan_code();
  const bool negative = (std::bit_cast<uint32_t>(x) >> 31) != 0;
  const double a = negative ? -static_cast<double>(x) : static_cast<double>(x);
  // The codes of a format are ordered like their magnitudes, so the nearest one is found by bisection.
  int low = 0, high = f.max_code();
  if (a >= static_cast<double>(decode(f, high))) {
    low = high;
  } else {
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (a >= static_cast<double>(decode(f, middle)) ? low : high) = middle;
    }
    const double below = a - static_cast<double>(decode(f, low)), above = static_cast<double>(decode(f, high)) - a;
    if (above < below || (above == below && high % 2 == 0)) low = high;
  }
  return low | (negative ? f.magnitudes() : 0);
}

constexpr int encode(Format f, float x) { return encode(row(f), x); }

/// The largest finite value of a format.
constexpr float largest(Format f) { return decode(f, row(f).max_code()); }

}  // namespace quire
