// Conversions from and to numbers of 16 bits and fewer.
#include <algorithm>

#include "cuda/emulator/operations.h"
#include "cuda/emulator/small_floats.h"

namespace quire::emulator {
namespace {

template <class From, const SmallFormat& kFormat, Rounding kRounding>
const Instruction* encode_one(Thread& t, const Instruction& i) {
  t.set(i.at[0], encode_small<kFormat, kRounding>(static_cast<double>(t.read<From>(i.at[1]))));
  return &i + 1;
}

/// Of two numbers: the first one comes to the upper bits.
template <const SmallFormat& kFormat, int kBits, Rounding kRounding>
const Instruction* encode_two(Thread& t, const Instruction& i) {
  const auto code = [&](int slot) { return encode_small<kFormat, kRounding>(t.read<float>(slot)); };
  t.set(i.at[0], code(i.at[1]) << kBits | code(i.at[2]));
  return &i + 1;
}
/// Of the two float16 in a register.
template <const SmallFormat& kFormat, int kBits>
const Instruction* encode_halves(Thread& t, const Instruction& i) {
  const auto both = t.read<uint32_t>(i.at[1]);
  t.set(i.at[0],
        encode_small<kFormat>(f16_value(both >> 16)) << kBits | encode_small<kFormat>(f16_value(both & 0xFFFF)));
  return &i + 1;
}

template <float (*kValue)(uint32_t)>
const Instruction* decode_one(Thread& t, const Instruction& i) {
  t.write<float>(i.at[0], kValue(t.read<uint16_t>(i.at[1])));
  return &i + 1;
}
template <float (*kValue)(uint32_t)>
const Instruction* decode_to_double(Thread& t, const Instruction& i) {
  t.write<double>(i.at[0], kValue(t.read<uint16_t>(i.at[1])));
  return &i + 1;
}
/// To two float16, which hold each of these numbers.
template <float (*kValue)(uint32_t), int kBits>
const Instruction* decode_two(Thread& t, const Instruction& i) {
  const auto both = t.read<uint32_t>(i.at[1]);
  const auto half = [](uint32_t code) { return encode_small<kF16>(kValue(code & ((1u << kBits) - 1))); };
  t.set(i.at[0], half(both >> kBits) << 16 | half(both));
  return &i + 1;
}

template <const SmallFormat& kFormat>
void add_half(Table& table, const std::string& type) {
  table["cvt.rn." + type + ".f32"] = encode_one<float, kFormat, Rounding::nearest>;
  table["cvt.rz." + type + ".f32"] = encode_one<float, kFormat, Rounding::zero>;
  table["cvt.rn." + type + ".f64"] = encode_one<double, kFormat, Rounding::nearest>;
  table["cvt.rn." + type + ".s16"] = encode_one<int16_t, kFormat, Rounding::nearest>;
  table["cvt.rn." + type + ".u16"] = encode_one<uint16_t, kFormat, Rounding::nearest>;
  table["cvt.rn." + type + ".s32"] = encode_one<int32_t, kFormat, Rounding::nearest>;
  table["cvt.rn." + type + ".u32"] = encode_one<uint32_t, kFormat, Rounding::nearest>;
  table["cvt.rn." + type + "x2.f32"] = encode_two<kFormat, 16, Rounding::nearest>;
  table["cvt.rz." + type + "x2.f32"] = encode_two<kFormat, 16, Rounding::zero>;
}

template <const SmallFormat& kFormat, float (*kValue)(uint32_t), int kBits>
void add_code(Table& table, const std::string& type) {
  table["cvt.rn.satfinite." + type + "x2.f32"] = encode_two<kFormat, kBits, Rounding::nearest>;
  table["cvt.rn.satfinite." + type + "x2.f16x2"] = encode_halves<kFormat, kBits>;
  table["cvt.rn.f16x2." + type + "x2"] = decode_two<kValue, kBits>;
}

}  // namespace

void add_small_conversions(Table& table) {
  add_half<kF16>(table, "f16");
  add_half<kBf16>(table, "bf16");
  table["cvt.f32.f16"] = decode_one<f16_value>;
  table["cvt.f32.bf16"] = decode_one<bf16_value>;
  table["cvt.f64.f16"] = decode_to_double<f16_value>;
  table["cvt.f64.bf16"] = decode_to_double<bf16_value>;
  add_code<kE4m3, e4m3_value, 8>(table, "e4m3");
  add_code<kE5m2, e5m2_value, 8>(table, "e5m2");
  add_code<kE2m1, e2m1_value, 4>(table, "e2m1");
}

}  // namespace quire::emulator
