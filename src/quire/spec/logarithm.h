// log(1 + x) as a sequence of operations of float64 in this order: the same bits on every device.
#pragma once

#include <bit>
#include <cstdint>

#include "quire/base/host_device.h"

namespace quire {

/// log(1 + x) of x >= 0, within 1.01 * 2^-24 of it relatively where it is a normal number (numerics.md 11.1). Inf of
/// Inf, NaN of NaN.
constexpr float log1p_f32(float x) {
  if (!(x <= 0x1.FFFFFEp127f)) return x;
  constexpr double ln2 = 0x1.62e42fefa39efp-1, sqrt2 = 0x1.6a09e667f3bcdp0;
  // 1 + x = 2^whole * m, with m around 1.
  const uint64_t bits = std::bit_cast<uint64_t>(1.0 + static_cast<double>(x));
  int whole = static_cast<int>(bits >> 52) - 1023;
  double m = std::bit_cast<double>((bits & 0xFFFFFFFFFFFFFu) | (uint64_t{1023} << 52));
  if (m > sqrt2) m *= 0.5, ++whole;
  // m - 1, with all bits of an x that is small.
  const double f = whole == 0 ? static_cast<double>(x) : m - 1.0;
  const double s = f / (2.0 + f), square = s * s;
  double p = 1.0 / 17;
  QUIRE_UNROLL
  for (int n = 15; n >= 1; n -= 2) p = p * square + 1.0 / n;
  return static_cast<float>(static_cast<double>(whole) * ln2 + 2.0 * s * p);
}

}  // namespace quire
