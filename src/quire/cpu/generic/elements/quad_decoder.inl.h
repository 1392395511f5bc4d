// Codes of 8 bits to float32, four times kLanes of them at a time.
#pragma once

#include "quire/cpu/generic/elements/codes.inl.h"

/// What the upper half of a float32, a bfloat16, has to gain for it to have a code's value, once the code's magnitude
/// lies where the fraction ends: in two bytes, by magnitude; that of 15 is that of all above. Subnormals differ.
struct UpperHalfGains {
  std::array<uint8_t, 16> low{}, high{};
};
template <Format F>
constexpr bool kHasUpperHalfGains = row(F).man_bits <= 3 && row(F).magnitudes() == 0x80 && row(F).max_code() < 0x7F;
template <Format F>
constexpr UpperHalfGains kUpperHalfGains = [] {
  UpperHalfGains gains;
  for (uint32_t i = 0; i < 16; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(quire::decode(F, static_cast<int>(i))) >> 16;
    const uint32_t gain = bits - (i << (7 - row(F).man_bits));
    gains.low[i] = static_cast<uint8_t>(gain), gains.high[i] = static_cast<uint8_t>(gain >> 8);
  }
  return gains;
}();

/// decode() of four codes of 8 bits in each lane (NaN may carry another payload). By way of bfloat16, which holds each
/// of them and half as many bits, and by tables: float32 subnormals would be slow on some machines. Members that are
/// the same for all formats are so that loops read them from memory, where they would be made anew each time.
class QuadDecoder {
 public:
  explicit QuadDecoder(Format f)
      : format_(f), up_(7 - row(f).man_bits), largest_(Signed{} + static_cast<int8_t>(row(f).max_code())) {
    const UpperHalfGains* gains = nullptr;
    with_element<kByteElements>(f, [&](auto element) {
      if constexpr (kHasUpperHalfGains<element>) gains = &kUpperHalfGains<element>;
    });
    one_by_one_ = gains == nullptr;
    if (one_by_one_) return;
    first_normal_ = Bytes{} + static_cast<uint8_t>(1 << row(f).man_bits);
    normal_span_ = Bytes{} + static_cast<uint8_t>(2 * (row(f).max_code() - (1 << row(f).man_bits)));
    for (int64_t i = 0; i < 4 * kLanes; ++i) (i % 2 ? odd_factors_ : even_factors_)[i] = static_cast<uint8_t>(1 << up_);
    kept_signed_ = U16{} + static_cast<uint16_t>(0x8000 | 0x7F << up_);
    fields_ = U32{} + (0x80000000u | 0x7Fu << (up_ + 16));
    normal_gain_ = U16{} + static_cast<uint16_t>(gains->high[15] << 8 | gains->low[15]);
    low_ = repeat_table(gains->low.data()), high_ = repeat_table(gains->high.data());
    normal_ = Bytes{} + gains->high[15];
    kept_ = U16{} + static_cast<uint16_t>(0x7F << up_);
  }

  /// to[c]: the values of the codes in byte c of the lanes.
  void decode(U32 codes, F32 (&to)[4]) const {
    if (one_by_one_) return decode_one_by_one(format_, codes, to);
    const Bytes bytes = reinterpret_cast<Bytes>(codes), magnitude = bytes & magnitudes_;
    const Bytes index = smaller(magnitude, last_);
    // What a normal code gains, gained twice, makes the format's infinity or NaN one of float32.
    const Bytes special = reinterpret_cast<Bytes>(reinterpret_cast<Signed>(magnitude) > largest_) & normal_;
    const Bytes low = look_up(low_, index), high = (look_up(high_, index) + special) | (bytes & sign_);
    const U16 m = reinterpret_cast<U16>(magnitude), l = reinterpret_cast<U16>(low), h = reinterpret_cast<U16>(high);
    widen((m << up_ & kept_) + (l & lower_) + (h << 8), (m >> (8 - up_) & kept_) + (l >> 8) + (h & upper_), to);
  }

  /// The same of normal numbers: all of them gain the same, and need no tables.
  void decode_normal(Bytes codes, F32 (&to)[4]) const {
    widen((multiply_pairs(even_factors_, codes) & kept_signed_) + normal_gain_,
          (multiply_pairs(odd_factors_, codes) & kept_signed_) + normal_gain_, to);
  }

  /// Bits of a float32 whose exponent is as much too small as a code's own, without what a normal code gains: the
  /// values of normal codes times field_unit().
  void decode_fields(Bytes codes, F32 (&to)[4]) const {
    const U32 even = reinterpret_cast<U32>(multiply_pairs(even_factors_, codes));
    const U32 odd = reinterpret_cast<U32>(multiply_pairs(odd_factors_, codes));
    to[0] = reinterpret_cast<F32>((even << 16) & fields_), to[1] = reinterpret_cast<F32>((odd << 16) & fields_);
    to[2] = reinterpret_cast<F32>(even & fields_), to[3] = reinterpret_cast<F32>(odd & fields_);
  }
  float field_unit() const { return static_cast<float>(quire::power_of_two(row(format_).bias - 127)); }

  /// Whether codes are all normal numbers: neither 0 nor subnormal, infinite or NaN. most: larger() of normal_excess()
  /// of each.
  bool all_normal(Bytes most) const {
    return !one_by_one_ && !any(reinterpret_cast<U32>(reinterpret_cast<Bytes>(most > normal_span_)));
  }
  Bytes normal_excess(Bytes codes) const {
    const Bytes above = codes - first_normal_;
    return above + above;  // without signs
  }

 private:
  typedef Vec<int8_t, 4 * kLanes> Signed;

  /// The same for formats that have no such tables. Not of `this`, whose members could then not stay in registers.
  [[gnu::noinline]] static void decode_one_by_one(Format format, U32 codes, F32 (&to)[4]) {
    for (int c = 0; c < 4; ++c)
      for (int i = 0; i < kLanes; ++i) to[c][i] = quire::decode(format, static_cast<int>(codes[i] >> (8 * c) & 0xFF));
  }

  /// Of codes 0 and 2, and 1 and 3, of each lane as bfloat16.
  void widen(U16 even, U16 odd, F32 (&to)[4]) const {
    const U32 e = reinterpret_cast<U32>(even), o = reinterpret_cast<U32>(odd);
    to[0] = reinterpret_cast<F32>(e << 16), to[1] = reinterpret_cast<F32>(o << 16);
    to[2] = reinterpret_cast<F32>(e & top_), to[3] = reinterpret_cast<F32>(o & top_);
  }

  Bytes low_{}, high_{}, normal_{}, first_normal_{}, normal_span_{}, even_factors_{}, odd_factors_{};
  Format format_;
  bool one_by_one_ = false;
  int up_;  ///< from a code's magnitude to where a bfloat16's fraction ends
  Signed largest_;
  U16 kept_{}, kept_signed_{}, normal_gain_{};
  Bytes magnitudes_ = Bytes{} + 0x7F, sign_ = Bytes{} + 0x80, last_ = Bytes{} + 15;
  U16 lower_ = U16{} + 0x00FF, upper_ = U16{} + 0xFF00;
  U32 top_ = U32{} + 0xFFFF0000u, fields_{};
};
