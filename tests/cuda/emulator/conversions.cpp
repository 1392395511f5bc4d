#include <cfenv>
#include <cmath>
#include <limits>

#include "cuda/emulator/operations.h"
#include "cuda/emulator/small_floats.h"

namespace quire::emulator {
namespace {

template <class T>
T nearest_integer(T x) {
  return std::nearbyint(x);
}
template <class T>
T truncated(T x) {
  return std::trunc(x);
}
template <class T>
T floored(T x) {
  return std::floor(x);
}
template <class T>
T ceiled(T x) {
  return std::ceil(x);
}

/// A number of type From as a double.
struct Float {
  static double value(const Thread& t, int slot) { return t.read<float>(slot); }
  static constexpr bool is_double = false;
};
struct Double {
  static double value(const Thread& t, int slot) { return t.read<double>(slot); }
  static constexpr bool is_double = true;
};
struct Half {
  static double value(const Thread& t, int slot) { return f16_value(t.read<uint16_t>(slot)); }
  static constexpr bool is_double = false;
};

/// Beyond the integers the nearest one; of NaN 0, or the highest bit alone where one of the types has 64 bits.
template <class To, class From, auto kRound>
const Instruction* to_integer(Thread& t, const Instruction& i) {
  using Limits = std::numeric_limits<To>;
  using U = std::make_unsigned_t<To>;
  const double x = kRound(From::value(t, i.at[1]));
  constexpr To nan = From::is_double || sizeof(To) == 8 ? static_cast<To>(U{1} << (8 * sizeof(To) - 1)) : To{0};
  const To value = x != x                                    ? nan
                   : x <= static_cast<double>(Limits::min()) ? Limits::min()
                   : x >= static_cast<double>(Limits::max()) ? Limits::max()
                                                             : static_cast<To>(x);
  t.write<To>(i.at[0], value);
  return &i + 1;
}

template <class To, class From>
const Instruction* saturating(Thread& t, const Instruction& i) {
  using Limits = std::numeric_limits<To>;
  const auto x = static_cast<__int128>(t.read<From>(i.at[1]));
  const __int128 low = Limits::min(), high = Limits::max();
  t.write<To>(i.at[0], static_cast<To>(x < low ? low : x > high ? high : x));
  return &i + 1;
}

template <class To, class From, int kDirection>
const Instruction* directed(Thread& t, const Instruction& i) {
  std::fesetround(kDirection);
  volatile From x = t.read<From>(i.at[1]);
  volatile To result = static_cast<To>(x);
  std::fesetround(FE_TONEAREST);
  t.write<To>(i.at[0], result);
  return &i + 1;
}

template <class To, class From>
void add_to_float(Table& table, const std::string& to, const std::string& from) {
  table["cvt.rn." + to + from] = convert<To, From>;
  table["cvt.rz." + to + from] = directed<To, From, FE_TOWARDZERO>;
  table["cvt.rm." + to + from] = directed<To, From, FE_DOWNWARD>;
  table["cvt.rp." + to + from] = directed<To, From, FE_UPWARD>;
}

template <class To, class From>
void add_pair(Table& table, const std::string& to, const std::string& from) {
  table["cvt." + to + from] = convert<To, From>;
  table["cvt.sat." + to + from] = saturating<To, From>;
}

template <class To, class From>
void add_rounded(Table& table, const std::string& to, const std::string& from) {
  table["cvt.rni." + to + from] = to_integer<To, From, nearest_integer<double>>;
  table["cvt.rzi." + to + from] = to_integer<To, From, truncated<double>>;
  table["cvt.rmi." + to + from] = to_integer<To, From, floored<double>>;
  table["cvt.rpi." + to + from] = to_integer<To, From, ceiled<double>>;
}

/// Everything between an integer type T and the others.
template <class T>
void add_integer(Table& table, const std::string& type) {
  add_pair<T, uint8_t>(table, type, ".u8");
  add_pair<T, int8_t>(table, type, ".s8");
  add_pair<T, uint16_t>(table, type, ".u16");
  add_pair<T, int16_t>(table, type, ".s16");
  add_pair<T, uint32_t>(table, type, ".u32");
  add_pair<T, int32_t>(table, type, ".s32");
  add_pair<T, uint64_t>(table, type, ".u64");
  add_pair<T, int64_t>(table, type, ".s64");
  add_rounded<T, Float>(table, type, ".f32");
  add_rounded<T, Double>(table, type, ".f64");
  add_rounded<T, Half>(table, type, ".f16");
  add_to_float<float, T>(table, "f32.", type);
  add_to_float<double, T>(table, "f64.", type);
}

template <class T>
void add_integral_floats(Table& table, const std::string& types) {
  table["cvt.rni." + types] = unary<T, nearest_integer<T>>;
  table["cvt.rzi." + types] = unary<T, truncated<T>>;
  table["cvt.rmi." + types] = unary<T, floored<T>>;
  table["cvt.rpi." + types] = unary<T, ceiled<T>>;
}

}  // namespace

void add_conversions(Table& table) {
  add_integer<uint8_t>(table, "u8");
  add_integer<int8_t>(table, "s8");
  add_integer<uint16_t>(table, "u16");
  add_integer<int16_t>(table, "s16");
  add_integer<uint32_t>(table, "u32");
  add_integer<int32_t>(table, "s32");
  add_integer<uint64_t>(table, "u64");
  add_integer<int64_t>(table, "s64");
  add_to_float<float, double>(table, "f32.", "f64");
  table["cvt.f64.f32"] = convert<double, float>;
  table["cvt.f32.f32"] = convert<float, float>;
  add_integral_floats<float>(table, "f32.f32");
  add_integral_floats<double>(table, "f64.f64");
}

}  // namespace quire::emulator
