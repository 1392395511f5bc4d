// Scales of blocks from their amaxes, a vector of them at a time: the functions of spec/scale.h in vector words.
#pragma once

#include "quire/cpu/generic/elements/encode.inl.h"
#include "quire/cpu/generic/elements/plain.inl.h"

/// What a kind of scale is stored as.
template <ScaleKind S>
using Stored = std::conditional_t<S == ScaleKind::f32, float, uint8_t>;

/// Elements that share a scale of this kind along a line.
constexpr int64_t block_of(ScaleKind kind) {
  for (const FamilyRow& row : kFamilies)
    if (row.scale == kind && row.scope == Scope::block) return row.block;
  return 0;
}

/// What a scale depends on beside its amax.
struct ScaleRule {
  const QuantSpec& spec;
  float infinite;      ///< of scale_from_amax()
  GlobalScale global;  ///< NVFP4
};

/// The scale that is NaN.
template <ScaleKind S>
constexpr Stored<S> nan_scale() {
  if constexpr (S == ScaleKind::f32) return std::numeric_limits<float>::quiet_NaN();
  return S == ScaleKind::e8m0 ? kE8m0Nan : kBlockScaleNan;
}

/// The blocks whose scales are NaN (numerics.md 1.9), found where there is a NaN or Inf, which is seldom.
template <ScaleKind S, int64_t kMost>
struct LostBlocks {
  bool any = false;
  bool lost[kMost];

  /// From magnitudes in which NaN counts.
  void find(const float* amax, int64_t count) {
    any = true;
    for (int64_t i = 0; i < count; ++i) lost[i] = !is_finite(amax[i]);
  }
  void apply(int64_t count, Stored<S>* stored) const {
    for (int64_t i = 0; any && i < count; ++i)
      if (lost[i]) stored[i] = nan_scale<S>();
  }
};

/// scale_from_amax() (numerics.md 2.1).
inline F32 f32_scales(const ScaleRule& rule, F32 amax) {
  const F32 one = broadcast(1.0f), zero = {};
  const uint32_t kept = rule.spec.pow2 ? 0xFF800000u : ~0u;
  amax = amax < rule.spec.epsilon ? broadcast(rule.spec.epsilon) : amax;
  const F32 s = largest(rule.spec.element) / amax;
  const F32 finite = (bits_of(s) & 0x7F800000u) == 0x7F800000u ? broadcast(rule.infinite) : s;
  const F32 found = float_of(bits_of(finite) & kept);
  const F32 unusual = (bits_of(amax) & 0x7F800000u) == 0x7F800000u ? one : found;
  return amax == zero ? one : unusual;
}

/// e8m0_scale() of an amax that is not NaN (numerics.md 4.1): adding almost 1 to the exponent field rounds up; half of
/// that where the field is 0, whose numbers up to 2^-127 stay.
inline U32 e8m0_scales(float reciprocal, F32 amax) {
  const U32 u = bits_of(amax * reciprocal);
  const U32 up = (u + (u < 0x800000u ? U32{} + 0x3FFFFFu : U32{} + 0x7FFFFFu)) >> 23;
  return up > 254u ? U32{} + 254u : up;
}
inline F32 e8m0_multipliers(U32 byte) { return float_of(byte == 254u ? U32{} + 0x00400000u : (254u - byte) << 23); }

/// e8m0_value() (numerics.md 1.3).
inline F32 e8m0_values(U32 byte) {
  const U32 number = byte == 0u ? U32{} + 0x00400000u : byte << 23;
  return float_of(byte == 255u ? U32{} + 0x7FC00000u : number);
}

/// The block scales nearest to what is wanted, not negative, and nvfp4_multiplier() of them.
inline U32 nvfp4_scales(const GlobalScale& g, F32 wanted, float* multiplier) {
  const Rounded r = round_magnitudes<kBlockScaleFormat>(limited_magnitude(wanted, largest(kBlockScaleFormat)));
  const F32 m = 1.0f / ((r.sum - r.rounder) * g.decode);
  // An infinite amax times a multiplier that is 0 is NaN.
  const I32 nan = wanted != wanted;
  store(multiplier, ~nan & (m < kFloatMax) ? m : broadcast(kFloatMax));
  return nan ? U32{} + kBlockScaleNan : (bits_of(r.sum) + (bits_of(r.sum) >> 20)) & 0x7Fu;
}

/// Scales and multipliers of blocks, whole vectors of them (numerics.md 2.1, 4.1, 5.1).
template <ScaleKind S>
inline void block_scales(const ScaleRule& rule, const float* amax, int64_t count, Stored<S>* stored,
                         float* multiplier) {
  const float reciprocal = 1.0f / largest(rule.spec.element);
  for (int64_t i = 0; i < count; i += kLanes) {
    if constexpr (S == ScaleKind::f32) {
      const F32 s = f32_scales(rule, load(amax + i));
      store(stored + i, 1.0f / s);
      store(multiplier + i, s);
    } else if constexpr (S == ScaleKind::e8m0) {
      const U32 byte = e8m0_scales(reciprocal, load(amax + i));
      store_low(stored + i, byte);
      store(multiplier + i, e8m0_multipliers(byte));
    } else {
      store_low(stored + i, nvfp4_scales(rule.global, load(amax + i) * rule.global.block_mult, multiplier + i));
    }
  }
}
