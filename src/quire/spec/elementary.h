// exp and sigmoid of float32 as sequences of additions, multiplications and one division, in this order: the same bits
// on every instruction set, where those of mathematical libraries differ. Written so that loops over them vectorise.
#pragma once

#include <bit>
#include <cstdint>

#include "quire/base/table.h"

namespace quire {

/// The numbers of exp (numerics.md 11.1): how many powers of two e^x is, and what is left of x.
struct ExpRule {
  static constexpr float log2_e = 0x1.715476p0f, ln2_high = 0x1.63p-1f, ln2_low = -0x1.bd0106p-13f;
  /// Added to a small number and subtracted again, it leaves the nearest integer, which the sum's last bits are.
  static constexpr float rounder = 0x1.8p23f;
  /// From the highest power on.
  static constexpr float polynomial[] = {0x1.6a224ep-10f, 0x1.123b04p-7f, 0x1.5558f8p-5f, 0x1.55549p-3f,
                                         0x1.fffffcp-2f};
};

/// e^x, within 2 * 2^-24 of it relatively where it is a normal number (numerics.md 11.1). Inf above 88.72, 0 below
/// -103.98, NaN of NaN.
constexpr float exp_f32(float x) {
  using Rule = ExpRule;
  float v = x < -104.0f ? -104.0f : x;
  v = v > 89.0f ? 89.0f : v;
  const float shifted = v * Rule::log2_e + Rule::rounder;
  const float n = shifted - Rule::rounder;
  const float r = (v - n * Rule::ln2_high) - n * Rule::ln2_low;
  float p = entry<Rule::polynomial>(0);
  for (size_t i = 1; i < 5; ++i) p = p * r + entry<Rule::polynomial>(i);
  p = ((p * r) * r + r) + 1.0f;
  // 2^n in two factors: n reaches from -150 to 128, the exponents of normal numbers from -126 to 127.
  const int32_t whole = std::bit_cast<int32_t>(shifted) - std::bit_cast<int32_t>(Rule::rounder);
  const int32_t half = whole >> 1, rest = whole - half;
  const float first = std::bit_cast<float>(static_cast<uint32_t>(half + 127) << 23);
  const float second = std::bit_cast<float>(static_cast<uint32_t>(rest + 127) << 23);
  return (p * first) * second;
}

/// 1 / (1 + e^-x), within 4 * 2^-24 of it relatively where it is a normal number.
constexpr float sigmoid_f32(float x) { return 1.0f / (1.0f + exp_f32(-x)); }

}  // namespace quire
