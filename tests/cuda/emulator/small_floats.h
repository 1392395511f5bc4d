// Numbers of 16 bits and fewer, by the rules of PTX. Written from its text alone: what is tested with it has its own.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

namespace quire::emulator {

struct SmallFormat {
  int mantissa;       ///< bits
  int least;          ///< exponent of the smallest normal number
  double largest;     ///< finite one
  uint32_t sign;      ///< the bit
  uint32_t nan;       ///< what PTX writes
  uint32_t infinity;  ///< its code; that of the largest number where values beyond it become that
};

constexpr SmallFormat kF16{10, -14, 65504, 0x8000, 0x7FFF, 0x7C00};
constexpr SmallFormat kBf16{7, -126, 0x1.FEp127, 0x8000, 0x7FFF, 0x7F80};
constexpr SmallFormat kE4m3{3, -6, 448, 0x80, 0x7F, 0x7E};
constexpr SmallFormat kE5m2{2, -14, 57344, 0x80, 0x7F, 0x7B};
constexpr SmallFormat kE2m1{1, 0, 6, 0x8, 0x7, 0x7};

enum class Rounding { nearest, zero };

/// The code of a number, rounded to nearest even or toward zero.
template <const SmallFormat& kFormat, Rounding kRounding = Rounding::nearest>
inline uint32_t encode_small(double x) {
  if (x != x) return kFormat.nan;
  const uint64_t bits = std::bit_cast<uint64_t>(x);
  const uint32_t sign = bits >> 63 ? kFormat.sign : 0;
  const double magnitude = std::fabs(x);
  // That of infinity is one too large for power().
  const int exponent = std::clamp(static_cast<int>(bits >> 52 & 0x7FF) - 1023, kFormat.least, 1023);
  // How many of the smallest steps at this exponent; adding 2^52 rounds it to an integer.
  const auto power = [](int e) { return std::bit_cast<double>(static_cast<uint64_t>(e + 1023) << 52); };
  const double exact = magnitude * power(kFormat.mantissa - exponent);
  const double limit = power(kFormat.mantissa + 1);
  double steps = exact >= limit ? limit : exact + 0x1p52 - 0x1p52;
  if (kRounding == Rounding::zero && steps > exact) steps -= 1;
  if (steps * power(exponent - kFormat.mantissa) > kFormat.largest || exact >= limit) {
    const bool finite = kRounding == Rounding::zero && !std::isinf(x);
    return sign | (finite ? kFormat.infinity - (kFormat.infinity > 0xFF ? 1 : 0) : kFormat.infinity);
  }
  // The next exponent follows from the carry.
  const auto code =
      static_cast<uint32_t>(steps) + (static_cast<uint32_t>(exponent - kFormat.least) << kFormat.mantissa);
  return sign | code;
}

inline float f16_value(uint32_t bits) {
  const uint32_t sign = (bits & 0x8000) << 16, exponent = bits >> 10 & 31, mantissa = bits & 0x3FF;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7F800000 | mantissa << 13);
  if (exponent == 0)
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(static_cast<float>(mantissa) * 0x1p-24f));
  return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
}
inline float bf16_value(uint32_t bits) { return std::bit_cast<float>((bits & 0xFFFF) << 16); }
inline float e5m2_value(uint32_t bits) { return f16_value((bits & 0xFF) << 8); }
inline float e4m3_value(uint32_t bits) {
  if ((bits & 0x7F) == 0x7F) return NAN;
  const auto exponent = static_cast<int>(bits >> 3 & 15), mantissa = static_cast<int>(bits & 7);
  const float value = exponent == 0 ? static_cast<float>(mantissa) * 0x1p-9f
                                    : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return bits & 0x80 ? -value : value;
}
inline float e2m1_value(uint32_t bits) {
  constexpr float values[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  return bits & 8 ? -values[bits & 7] : values[bits & 7];
}

}  // namespace quire::emulator
