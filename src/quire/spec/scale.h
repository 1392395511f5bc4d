// From an amax to a scale: one small function per rule of the contract. All arithmetic is float32, round to nearest
// even, in the order written; the kernels and the reference call these same functions.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

#include "quire/format/codec.h"
#include "quire/spec/quant_spec.h"

namespace quire {

inline constexpr float kFloatMax = 0x1.FFFFFEp127f;

/// The bytes that are NaN as scales.
inline constexpr uint8_t kE8m0Nan = 255, kBlockScaleNan = 0x7F;

constexpr bool is_finite(float x) { return (std::bit_cast<uint32_t>(x) & 0x7F800000u) != 0x7F800000u; }

/// numerics.md 2.1. `infinite` replaces a scale that overflows: FLT_MAX per tensor, the largest value of the input's
/// dtype per block. With the option `nan`, an amax above blocks that is not finite
/// gives NaN (1.9).
constexpr float scale_from_amax(float amax, const QuantSpec& spec, float infinite) {
  if (amax < spec.epsilon) amax = spec.epsilon;
  if (!is_finite(amax))
    return spec.nan && spec.row().scope != Scope::block ? std::numeric_limits<float>::quiet_NaN() : 1.0f;
  if (amax == 0) return 1.0f;
  float s = largest(spec.element) / amax;
  if (!is_finite(s)) s = infinite;
  return spec.pow2 ? std::bit_cast<float>(std::bit_cast<uint32_t>(s) & 0xFF800000u) : s;
}

/// numerics.md 1.3: the smallest power of two not below v >= 0, as an E8M0 byte; NaN 255, infinity 254.
constexpr uint8_t e8m0_up(float v) {
  const uint32_t u = std::bit_cast<uint32_t>(v);
  if (v != v) return 255;
  const uint32_t exponent = u >> 23, fraction = u & 0x7FFFFFu;
  if (exponent == 255) return 254;
  const bool up = fraction != 0 && exponent != 254 && !(exponent == 0 && fraction <= 0x400000u);
  return static_cast<uint8_t>(exponent + (up ? 1 : 0));
}

/// The E8M0 byte of a block: amax times the rounded reciprocal of the largest element (numerics.md 4.1, 0.17).
constexpr uint8_t e8m0_scale(float amax, Format element) { return e8m0_up(amax * (1.0f / largest(element))); }

/// Multiplier that quantizes under byte b: 2^(127 - b) (numerics.md 1.3).
constexpr float e8m0_multiplier(uint8_t b) {
  if (b == 255) return std::numeric_limits<float>::quiet_NaN();
  return std::bit_cast<float>(b == 254 ? 0x00400000u : (254u - b) << 23);
}

/// Multiplier that dequantizes under byte b: 2^(b - 127) (numerics.md 1.3).
constexpr float e8m0_value(uint8_t b) {
  if (b == 255) return std::numeric_limits<float>::quiet_NaN();
  return std::bit_cast<float>(b == 0 ? 0x00400000u : static_cast<uint32_t>(b) << 23);
}

/// What the amax buffer of NVFP4 holds for an amax: that itself, or the global scale of the option `global`
/// (numerics.md 5.11).
constexpr float stored_global(float amax, const QuantSpec& spec) {
  const float most = spec.block_scale_max() * 6.0f;
  if (spec.global == Global::amax) return amax;
  if (amax == 0) return 1.0f;
  if (spec.global == Global::divisor) return most / amax < kFloatMax ? most / amax : kFloatMax;
  return amax / most > 0 ? amax / most : 1.0f;
}

/// The global scale of NVFP4, derived from one amax (numerics.md 5.1; 5.8 where the block scale's maximum is 256), or
/// given by the option `global` (5.11).
struct GlobalScale {
  float stored;      ///< g
  float encode;      ///< Senc
  float decode;      ///< Sdec = 1 / Senc
  float block_mult;  ///< Senc * fl32(1/6)
};

constexpr GlobalScale global_scale(float amax, float block_scale_max) {
  float encode = block_scale_max * 6.0f / amax;
  // NaN fails the comparison and becomes FLT_MAX, as a minimum that ignores NaN would give.
  if (!(encode < kFloatMax)) encode = kFloatMax;
  if (amax == 0 || encode == 0) encode = 1.0f;
  return {amax, encode, 1.0f / encode, encode * (1.0f / 6.0f)};
}

/// The same of what a spec stores.
constexpr GlobalScale global_scale(float stored, const QuantSpec& spec) {
  if (spec.global == Global::amax) return global_scale(stored, spec.block_scale_max());
  const bool multiplies = spec.global == Global::multiplier;
  float encode = multiplies ? 1.0f / stored : stored;
  if (!(encode < kFloatMax)) encode = kFloatMax;
  if (encode == 0) return {stored, 1.0f, 1.0f, 1.0f / 6.0f};  // of an infinite amax, as without the option
  return {stored, encode, multiplies ? stored : 1.0f / encode, encode * (1.0f / 6.0f)};
}

/// What NVFP4 multiplies elements by under block scale S (decoded): min(1 / (S * Sdec), FLT_MAX).
constexpr float nvfp4_multiplier(float block_scale, const GlobalScale& g) {
  const float d = block_scale * g.decode;
  if (d == 0) return kFloatMax;
  const float m = 1.0f / d;
  return m < kFloatMax ? m : kFloatMax;
}

/// What NVFP4 multiplies codes by under block scale S (decoded), left to right (numerics.md 5.1, 0.6).
constexpr float nvfp4_value(float block_scale, float amax, float block_scale_max) {
  return block_scale * amax * (1.0f / (6.0f * block_scale_max));
}

/// The same under what a spec stores.
constexpr float nvfp4_value(float block_scale, float stored, const QuantSpec& spec) {
  if (spec.global == Global::amax) return nvfp4_value(block_scale, stored, spec.block_scale_max());
  return spec.global == Global::multiplier ? block_scale * stored : block_scale / stored;
}

/// What an NVFP4 operand leaves to multiply finished sums by, and to divide them by (numerics.md 5.10).
constexpr float global_factor(float stored, const QuantSpec& spec) {
  return spec.global == Global::divisor ? 1.0f / stored : stored;
}
constexpr float global_divisor(const QuantSpec& spec) {
  return spec.global == Global::amax ? 6.0f * spec.block_scale_max() : 1.0f;
}

}  // namespace quire
