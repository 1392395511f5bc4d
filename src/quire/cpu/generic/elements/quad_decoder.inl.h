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

/// Decodes four codes of 8 bits in each lane to float32 whose exponents are as much too small as the codes' own: to
/// their values times unit(). Not what is infinite or NaN; subnormals are subnormal in float32 too.
class FieldDecoder {
 public:
  /// Codes of even bytes, and of odd ones, in the upper halves of words: sign, exponent, fraction, each with other bits
  /// above the exponent and below the fraction.
  struct Pairs {
    U32 even, odd;
  };
  explicit FieldDecoder(Format f)
      : finite_(Bytes{} + static_cast<uint8_t>(2 * row(f).max_code())),
        even_(reinterpret_cast<Bytes>(U16{} + static_cast<uint16_t>(1 << up(f)))),
        odd_(reinterpret_cast<Bytes>(U16{} + static_cast<uint16_t>(256 << up(f)))),
        kept_(U32{} + (0x80000000u | 0x7Fu << (up(f) + 16))) {}

  static bool takes(Format f) {
    bool taken = false;
    with_element<kByteElements>(f, [&](auto element) { taken = kHasUpperHalfGains<element>; });
    return taken;
  }
  static float unit(Format f) { return static_cast<float>(quire::power_of_two(row(f).bias - 127)); }

  Pairs pairs(Bytes codes) const {
    return {reinterpret_cast<U32>(multiply_pairs(even_, codes)), reinterpret_cast<U32>(multiply_pairs(odd_, codes))};
  }
  /// Of byte c of the lanes.
  F32 lane(const Pairs& codes, int c) const {
    const U32 pair = c % 2 ? codes.odd : codes.even;
    return reinterpret_cast<F32>((c < 2 ? pair << 16 : pair) & kept_);
  }

  /// Whether no code is infinite or NaN. most: larger() of magnitude() of each.
  bool all_finite(Bytes most) const { return !any(reinterpret_cast<U32>(reinterpret_cast<Bytes>(most > finite_))); }
  static Bytes magnitude(Bytes codes) { return codes + codes; }  // doubled, which takes the sign away

 private:
  static int up(Format f) { return 7 - row(f).man_bits; }

  Bytes finite_, even_, odd_;
  U32 kept_;
};

/// decode() of four codes of 8 bits in each lane (NaN may carry another payload). By way of bfloat16, which holds each
/// of them and half as many bits, and by tables: float32 subnormals would be slow on some machines. Members that are
/// the same for all formats are so that loops read them from memory, where they would be made anew each time.
class QuadDecoder {
 public:
  explicit QuadDecoder(Format f)
      : fields_(f), format_(f), up_(7 - row(f).man_bits), largest_(Signed{} + static_cast<int8_t>(row(f).max_code())) {
    const UpperHalfGains* gains = nullptr;
    with_element<kByteElements>(f, [&](auto element) {
      if constexpr (kHasUpperHalfGains<element>) gains = &kUpperHalfGains<element>;
    });
    one_by_one_ = gains == nullptr;
    if (one_by_one_) return;
    first_normal_ = Bytes{} + static_cast<uint8_t>(1 << row(f).man_bits);
    normal_span_ = Bytes{} + static_cast<uint8_t>(2 * (row(f).max_code() - (1 << row(f).man_bits)));
    kept_signed_ = U16{} + static_cast<uint16_t>(0x8000 | 0x7F << up_);
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
    const FieldDecoder::Pairs pairs = fields_.pairs(codes);
    widen((reinterpret_cast<U16>(pairs.even) & kept_signed_) + normal_gain_,
          (reinterpret_cast<U16>(pairs.odd) & kept_signed_) + normal_gain_, to);
  }

  /// By a FieldDecoder.
  void decode_fields(Bytes codes, F32 (&to)[4]) const {
    const FieldDecoder::Pairs pairs = fields_.pairs(codes);
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) to[c] = fields_.lane(pairs, c);
  }

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

  Bytes low_{}, high_{}, normal_{}, first_normal_{}, normal_span_{};
  FieldDecoder fields_;
  Format format_;
  bool one_by_one_ = false;
  int up_;  ///< from a code's magnitude to where a bfloat16's fraction ends
  Signed largest_;
  U16 kept_{}, kept_signed_{}, normal_gain_{};
  Bytes magnitudes_ = Bytes{} + 0x7F, sign_ = Bytes{} + 0x80, last_ = Bytes{} + 15;
  U16 lower_ = U16{} + 0x00FF, upper_ = U16{} + 0xFF00;
  U32 top_ = U32{} + 0xFFFF0000u;
};
