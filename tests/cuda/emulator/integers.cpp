#include <algorithm>
#include <functional>
#include <limits>

#include "cuda/emulator/operations.h"

namespace quire::emulator {
namespace {

/// Wraps instead of overflowing.
template <class T, auto kFunction>
constexpr T wrapped(T a, T b) {
  using U = std::make_unsigned_t<T>;
  return static_cast<T>(kFunction(static_cast<uint64_t>(static_cast<U>(a)), static_cast<uint64_t>(static_cast<U>(b))));
}
template <class T>
constexpr T product(T a, T b) {
  return wrapped<T, std::multiplies<uint64_t>{}>(a, b);
}
template <class T>
constexpr T sum(T a, T b) {
  return wrapped<T, std::plus<uint64_t>{}>(a, b);
}

template <class T>
T quotient(T a, T b) {
  if (b == 0) throw Error("a division by 0");
  if (std::is_signed_v<T> && b == static_cast<T>(-1)) return wrapped<T, std::minus<uint64_t>{}>(0, a);
  return static_cast<T>(a / b);
}
template <class T>
T remainder(T a, T b) {
  if (b == 0) throw Error("a division by 0");
  return std::is_signed_v<T> && b == static_cast<T>(-1) ? T{0} : static_cast<T>(a % b);
}

template <class T>
using Wider = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;

/// The upper half of a product.
template <class T>
constexpr T high(T a, T b) {
  return static_cast<T>(static_cast<Wider<T>>(a) * static_cast<Wider<T>>(b) >> (8 * sizeof(T)));
}

template <class T>
const Instruction* shift_right(Thread& t, const Instruction& i) {
  const uint32_t by = std::min<uint32_t>(t.read<uint32_t>(i.at[2]), 8 * sizeof(T));
  const T value = t.read<T>(i.at[1]), filled = value < T{0} ? static_cast<T>(-1) : T{0};
  t.write<T>(i.at[0], by == 8 * sizeof(T) ? filled : static_cast<T>(value >> by));
  return &i + 1;
}

template <class T, class Wide>
const Instruction* multiply_wide(Thread& t, const Instruction& i) {
  t.write<Wide>(i.at[0], product<Wide>(t.read<T>(i.at[1]), t.read<T>(i.at[2])));
  return &i + 1;
}
template <class T, class Wide>
const Instruction* multiply_add_wide(Thread& t, const Instruction& i) {
  t.write<Wide>(i.at[0], sum(product<Wide>(t.read<T>(i.at[1]), t.read<T>(i.at[2])), t.read<Wide>(i.at[3])));
  return &i + 1;
}

/// a + b with the carry of the operation before, and the carry of this one.
template <class T, bool kTakes, bool kGives, bool kSubtracts>
const Instruction* with_carry(Thread& t, const Instruction& i) {
  using U = std::make_unsigned_t<T>;
  const U a = t.read<U>(i.at[1]), b = t.read<U>(i.at[2]);
  const unsigned in = kTakes && t.carry ? 1 : 0;
  const auto exact = kSubtracts ? static_cast<__int128>(a) - b - in : static_cast<__int128>(a) + b + in;
  if (kGives) t.carry = exact < 0 || exact > std::numeric_limits<U>::max();
  t.write<U>(i.at[0], static_cast<U>(exact));
  return &i + 1;
}
template <class T, bool kHigh, bool kTakes, bool kGives>
const Instruction* multiply_add_with_carry(Thread& t, const Instruction& i) {
  using U = std::make_unsigned_t<T>;
  const T a = t.read<T>(i.at[1]), b = t.read<T>(i.at[2]);
  const U part = static_cast<U>(kHigh ? high(a, b) : product(a, b));
  const auto exact = static_cast<unsigned __int128>(part) + t.read<U>(i.at[3]) + (kTakes && t.carry ? 1 : 0);
  if (kGives) t.carry = exact > std::numeric_limits<U>::max();
  t.write<U>(i.at[0], static_cast<U>(exact));
  return &i + 1;
}

template <class T>
void add_carries(Table& table, const std::string& type) {
  table["add.cc." + type] = with_carry<T, false, true, false>;
  table["addc." + type] = with_carry<T, true, false, false>;
  table["addc.cc." + type] = with_carry<T, true, true, false>;
  table["sub.cc." + type] = with_carry<T, false, true, true>;
  table["subc." + type] = with_carry<T, true, false, true>;
  table["subc.cc." + type] = with_carry<T, true, true, true>;
  table["mad.lo.cc." + type] = multiply_add_with_carry<T, false, false, true>;
  table["mad.hi.cc." + type] = multiply_add_with_carry<T, true, false, true>;
  table["madc.lo." + type] = multiply_add_with_carry<T, false, true, false>;
  table["madc.hi." + type] = multiply_add_with_carry<T, true, true, false>;
  table["madc.lo.cc." + type] = multiply_add_with_carry<T, false, true, true>;
  table["madc.hi.cc." + type] = multiply_add_with_carry<T, true, true, true>;
}

template <class T>
void add_type(Table& table, const std::string& type) {
  table["add." + type] = binary<T, sum<T>>;
  table["sub." + type] = binary<T, wrapped<T, std::minus<uint64_t>{}>>;
  table["mul.lo." + type] = binary<T, product<T>>;
  table["mul.hi." + type] = binary<T, high<T>>;
  table["mad.lo." + type] = ternary<T, [](T a, T b, T c) { return sum(product(a, b), c); }>;
  table["mad.hi." + type] = ternary<T, [](T a, T b, T c) { return sum(high(a, b), c); }>;
  table["div." + type] = binary<T, quotient<T>>;
  table["rem." + type] = binary<T, remainder<T>>;
  table["min." + type] = binary<T, [](T a, T b) { return std::min(a, b); }>;
  table["max." + type] = binary<T, [](T a, T b) { return std::max(a, b); }>;
  table["neg." + type] = unary<T, [](T a) { return wrapped<T, std::minus<uint64_t>{}>(0, a); }>;
  table["abs." + type] = unary<T, [](T a) { return a < T{0} ? wrapped<T, std::minus<uint64_t>{}>(0, a) : a; }>;
  table["sad." + type] = ternary<T, [](T a, T b, T c) {
    const T most = std::max(a, b), least = std::min(a, b);
    return sum(wrapped<T, std::minus<uint64_t>{}>(most, least), c);
  }>;
  table["shr." + type] = shift_right<T>;
  add_comparisons<T>(table, type);
}

template <class Unsigned, class Signed>
void add_width(Table& table, const std::string& width) {
  add_type<Unsigned>(table, "u" + width);
  add_type<Signed>(table, "s" + width);
  add_comparisons<Unsigned>(table, "b" + width);
  // Other names of the comparisons of unsigned numbers.
  for (const auto& [name, means] : {std::pair{"lo", "lt"}, {"ls", "le"}, {"hi", "gt"}, {"hs", "ge"}})
    table["setp." + std::string(name) + ".u" + width] = table["setp." + std::string(means) + ".u" + width];
}

template <class T>
int32_t limited(int64_t x) {
  return static_cast<int32_t>(std::clamp<int64_t>(x, std::numeric_limits<T>::min(), std::numeric_limits<T>::max()));
}
template <bool kSubtract>
int32_t saturated(int32_t a, int32_t b) {
  return limited<int32_t>(kSubtract ? int64_t{a} - b : int64_t{a} + b);
}

/// Of four (two) products of bytes, and a number.
template <class A, class B>
const Instruction* dot4(Thread& t, const Instruction& i) {
  const uint32_t a = t.read<uint32_t>(i.at[1]), b = t.read<uint32_t>(i.at[2]);
  uint32_t total = t.read<uint32_t>(i.at[3]);
  for (int n = 0; n < 32; n += 8)
    total += static_cast<uint32_t>(int32_t{static_cast<A>(a >> n)} * int32_t{static_cast<B>(b >> n)});
  t.write<uint32_t>(i.at[0], total);
  return &i + 1;
}

}  // namespace

void add_integers(Table& table) {
  add_width<uint16_t, int16_t>(table, "16");
  add_width<uint32_t, int32_t>(table, "32");
  add_width<uint64_t, int64_t>(table, "64");
  add_carries<uint32_t>(table, "u32");
  add_carries<int32_t>(table, "s32");
  add_carries<uint64_t>(table, "u64");
  add_carries<int64_t>(table, "s64");
  table["add.sat.s32"] = binary<int32_t, saturated<false>>;
  table["sub.sat.s32"] = binary<int32_t, saturated<true>>;
  table["mul.wide.u16"] = multiply_wide<uint16_t, uint32_t>;
  table["mul.wide.s16"] = multiply_wide<int16_t, int32_t>;
  table["mul.wide.u32"] = multiply_wide<uint32_t, uint64_t>;
  table["mul.wide.s32"] = multiply_wide<int32_t, int64_t>;
  table["mad.wide.u16"] = multiply_add_wide<uint16_t, uint32_t>;
  table["mad.wide.s16"] = multiply_add_wide<int16_t, int32_t>;
  table["mad.wide.u32"] = multiply_add_wide<uint32_t, uint64_t>;
  table["mad.wide.s32"] = multiply_add_wide<int32_t, int64_t>;
  table["dp4a.u32.u32"] = dot4<uint8_t, uint8_t>;
  table["dp4a.s32.s32"] = dot4<int8_t, int8_t>;
  table["dp4a.u32.s32"] = dot4<uint8_t, int8_t>;
  table["dp4a.s32.u32"] = dot4<int8_t, uint8_t>;
}

}  // namespace quire::emulator
