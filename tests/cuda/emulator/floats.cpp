#include <algorithm>
#include <cfenv>
#include <cmath>
#include <limits>

#include "cuda/emulator/operations.h"

namespace quire::emulator {
namespace {

template <class T>
T plus(T a, T b) {
  return a + b;
}
template <class T>
T minus(T a, T b) {
  return a - b;
}
template <class T>
T times(T a, T b) {
  return a * b;
}
template <class T>
T divided(T a, T b) {
  return a / b;
}
template <class T>
T fused(T a, T b, T c) {
  return std::fma(a, b, c);
}

/// In another direction than to nearest. Volatile, so that nothing is computed before the direction is set.
template <class T, int kDirection, auto kFunction, class... More>
T directed(T a, More... more) {
  std::fesetround(kDirection);
  volatile T first = a, result = kFunction(first, more...);
  std::fesetround(FE_TONEAREST);
  return result;
}

template <class T, int kDirection>
void add_direction(Table& table, const std::string& suffix) {
  table["add" + suffix] = binary<T, directed<T, kDirection, plus<T>, T>>;
  table["sub" + suffix] = binary<T, directed<T, kDirection, minus<T>, T>>;
  table["mul" + suffix] = binary<T, directed<T, kDirection, times<T>, T>>;
  table["div" + suffix] = binary<T, directed<T, kDirection, divided<T>, T>>;
  table["fma" + suffix] = ternary<T, directed<T, kDirection, fused<T>, T, T>>;
}

/// 0 to 1, and 0 of NaN.
template <class T>
T saturated(T a) {
  return a > 0 ? std::min(a, T{1}) : T{0};
}

template <class T>
void add_unordered(Table& table, const std::string& type) {
  add_comparisons<T>(table, type);
  // With u: true where one is NaN.
  table["setp.equ." + type] = compare<T, [](T a, T b) { return !(a < b || b < a); }>;
  table["setp.neu." + type] = compare<T, [](T a, T b) { return !(a == b); }>;
  table["setp.ltu." + type] = compare<T, [](T a, T b) { return !(b <= a); }>;
  table["setp.leu." + type] = compare<T, [](T a, T b) { return !(b < a); }>;
  table["setp.gtu." + type] = compare<T, [](T a, T b) { return !(a <= b); }>;
  table["setp.geu." + type] = compare<T, [](T a, T b) { return !(a < b); }>;
  table["setp.num." + type] = compare<T, [](T a, T b) { return !std::isnan(a) && !std::isnan(b); }>;
  table["setp.nan." + type] = compare<T, [](T a, T b) { return std::isnan(a) || std::isnan(b); }>;
}

template <class T>
void add_tests(Table& table, const std::string& type) {
  table["testp.finite." + type] = mapped<bool, T, [](T a) { return std::isfinite(a); }>;
  table["testp.infinite." + type] = mapped<bool, T, [](T a) { return std::isinf(a); }>;
  table["testp.number." + type] = mapped<bool, T, [](T a) { return !std::isnan(a); }>;
  table["testp.notanumber." + type] = mapped<bool, T, [](T a) { return std::isnan(a); }>;
  table["testp.normal." + type] = mapped<bool, T, [](T a) { return std::isnormal(a); }>;
  table["testp.subnormal." + type] = mapped<bool, T, [](T a) { return std::fpclassify(a) == FP_SUBNORMAL; }>;
}

template <class T>
void add_type(Table& table, const std::string& type) {
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  constexpr Bits sign = Bits{1} << (8 * sizeof(T) - 1);
  table["add.rn." + type] = binary<T, plus<T>>;
  table["sub.rn." + type] = binary<T, minus<T>>;
  table["mul.rn." + type] = binary<T, times<T>>;
  table["div.rn." + type] = binary<T, divided<T>>;
  table["fma.rn." + type] = ternary<T, fused<T>>;
  table["rcp.rn." + type] = unary<T, [](T a) { return 1 / a; }>;
  table["sqrt.rn." + type] = unary<T, [](T a) { return std::sqrt(a); }>;
  table["add.rn.sat." + type] = binary<T, [](T a, T b) { return saturated(a + b); }>;
  table["mul.rn.sat." + type] = binary<T, [](T a, T b) { return saturated(a * b); }>;
  table["fma.rn.sat." + type] = ternary<T, [](T a, T b, T c) { return saturated(std::fma(a, b, c)); }>;
  table["cvt.sat." + type + "." + type] = unary<T, saturated<T>>;
  table["min." + type] = binary<T, lesser<T>>;
  table["max." + type] = binary<T, greater<T>>;
  table["min.NaN." + type] = binary<T, [](T a, T b) { return std::isnan(a) || std::isnan(b) ? T{NAN} : lesser(a, b); }>;
  table["max.NaN." + type] =
      binary<T, [](T a, T b) { return std::isnan(a) || std::isnan(b) ? T{NAN} : greater(a, b); }>;
  table["neg." + type] = unary<Bits, [](Bits a) { return static_cast<Bits>(a ^ sign); }>;
  table["abs." + type] = unary<Bits, [](Bits a) { return static_cast<Bits>(a & ~sign); }>;
  // The sign is that of the first operand.
  table["copysign." + type] = binary<Bits, [](Bits a, Bits b) { return static_cast<Bits>((a & sign) | (b & ~sign)); }>;
  add_unordered<T>(table, type);
  add_tests<T>(table, type);
  add_direction<T, FE_TOWARDZERO>(table, ".rz." + type);
  add_direction<T, FE_DOWNWARD>(table, ".rm." + type);
  add_direction<T, FE_UPWARD>(table, ".rp." + type);
}

}  // namespace

void add_floats(Table& table) {
  add_type<float>(table, "f32");
  add_type<double>(table, "f64");
}

}  // namespace quire::emulator
