// What the operations of PTX do (PTX ISA 9.0, 9.7). Those alone that nvcc makes of the tests' kernels under
// -fmad=false: what is not exact or may be contracted, such as "add.f32" without ".rn", is unknown here.
#include <algorithm>
#include <cmath>
#include <limits>
#include <unordered_map>

#include "cuda/emulator/machine.h"

namespace quire::emulator {
namespace {

using Table = std::unordered_map<std::string, Operation>;

template <class T, auto kFunction>
void unary(Thread& t, const Instruction& i) {
  t.write<T>(i.at[0], kFunction(t.read<T>(i.at[1])));
}
template <class T, auto kFunction>
void binary(Thread& t, const Instruction& i) {
  t.write<T>(i.at[0], kFunction(t.read<T>(i.at[1]), t.read<T>(i.at[2])));
}
template <class T, auto kCompare>
void compare(Thread& t, const Instruction& i) {
  t.set(i.at[0], kCompare(t.read<T>(i.at[1]), t.read<T>(i.at[2])));
}
template <class T>
void move(Thread& t, const Instruction& i) {
  t.set(i.at[0], t.read<T>(i.at[1]));
}
template <class T>
void select(Thread& t, const Instruction& i) {
  t.set(i.at[0], t.read<T>(t.bits(i.at[3]) ? i.at[1] : i.at[2]));
}
template <class To, class From>
void convert(Thread& t, const Instruction& i) {
  t.write<To>(i.at[0], static_cast<To>(t.read<From>(i.at[1])));
}

/// Wraps instead of overflowing.
template <class T, auto kFunction>
constexpr T wrapped(T a, T b) {
  using U = std::make_unsigned_t<T>;
  return static_cast<T>(kFunction(static_cast<uint64_t>(static_cast<U>(a)), static_cast<uint64_t>(static_cast<U>(b))));
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
void shift_right(Thread& t, const Instruction& i) {
  const uint32_t by = std::min<uint32_t>(t.read<uint32_t>(i.at[2]), 8 * sizeof(T));
  const T value = t.read<T>(i.at[1]), filled = value < T{0} ? static_cast<T>(-1) : T{0};
  t.write<T>(i.at[0], by == 8 * sizeof(T) ? filled : static_cast<T>(value >> by));
}
template <class T>
void shift_left(Thread& t, const Instruction& i) {
  const uint32_t by = t.read<uint32_t>(i.at[2]);
  t.write<T>(i.at[0], by >= 8 * sizeof(T) ? T{0} : static_cast<T>(t.read<T>(i.at[1]) << by));
}
template <class T, class Wide>
void multiply_wide(Thread& t, const Instruction& i) {
  t.write<Wide>(i.at[0], static_cast<Wide>(t.read<T>(i.at[1])) * static_cast<Wide>(t.read<T>(i.at[2])));
}
template <class T>
void multiply_add(Thread& t, const Instruction& i) {
  const auto of = [&](int slot) { return static_cast<uint64_t>(t.read<T>(i.at[static_cast<size_t>(slot)])); };
  t.write<T>(i.at[0], static_cast<T>(of(1) * of(2) + of(3)));
}
/// The low bits of a, `length` of them, at `position` of b.
template <class T>
void insert_bits(Thread& t, const Instruction& i) {
  constexpr uint32_t bits = 8 * sizeof(T);
  const uint32_t position = t.read<uint32_t>(i.at[3]) & 255u, length = t.read<uint32_t>(i.at[4]) & 255u;
  const T ones = length >= bits ? static_cast<T>(~T{0}) : static_cast<T>((T{1} << length) - 1);
  const T mask = position >= bits ? T{0} : static_cast<T>(ones << position);
  const T moved = position >= bits ? T{0} : static_cast<T>(t.read<T>(i.at[1]) << position);
  t.write<T>(i.at[0], static_cast<T>((moved & mask) | (t.read<T>(i.at[2]) & ~mask)));
}

template <class T>
void integers(Table& table, const std::string& type) {
  table["add." + type] = binary<T, wrapped<T, std::plus<uint64_t>{}>>;
  table["sub." + type] = binary<T, wrapped<T, std::minus<uint64_t>{}>>;
  table["mul.lo." + type] = binary<T, wrapped<T, std::multiplies<uint64_t>{}>>;
  table["mad.lo." + type] = multiply_add<T>;
  table["div." + type] = binary<T, quotient<T>>;
  table["rem." + type] = binary<T, remainder<T>>;
  table["min." + type] = binary<T, [](T a, T b) { return std::min(a, b); }>;
  table["max." + type] = binary<T, [](T a, T b) { return std::max(a, b); }>;
  table["neg." + type] = unary<T, [](T a) { return wrapped<T, std::minus<uint64_t>{}>(0, a); }>;
  table["shr." + type] = shift_right<T>;
}

template <class T>
void comparisons(Table& table, const std::string& type) {
  table["setp.eq." + type] = compare<T, [](T a, T b) { return a == b; }>;
  table["setp.ne." + type] = compare<T, [](T a, T b) { return a < b || b < a; }>;
  table["setp.lt." + type] = compare<T, [](T a, T b) { return a < b; }>;
  table["setp.le." + type] = compare<T, [](T a, T b) { return a <= b; }>;
  table["setp.gt." + type] = compare<T, [](T a, T b) { return b < a; }>;
  table["setp.ge." + type] = compare<T, [](T a, T b) { return b <= a; }>;
}

template <class T>
void moves(Table& table, const std::string& type) {
  table["mov." + type] = move<T>;
  table["selp." + type] = select<T>;
}

template <class T>
void bits(Table& table, const std::string& type) {
  table["and." + type] = binary<T, [](T a, T b) { return static_cast<T>(a & b); }>;
  table["or." + type] = binary<T, [](T a, T b) { return static_cast<T>(a | b); }>;
  table["xor." + type] = binary<T, [](T a, T b) { return static_cast<T>(a ^ b); }>;
  table["not." + type] = unary<T, [](T a) { return static_cast<T>(~a); }>;
  table["shl." + type] = shift_left<T>;
  table["bfi." + type] = insert_bits<T>;
}

/// Of two numbers one of which is NaN the other one; -0 is below +0.
template <class T>
T lesser(T a, T b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) ? b : a;
  return a < b || (a == b && std::signbit(a)) ? a : b;
}
template <class T>
T greater(T a, T b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) ? b : a;
  return a > b || (a == b && !std::signbit(a)) ? a : b;
}

template <class T>
void floats(Table& table, const std::string& type) {
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  constexpr Bits sign = Bits{1} << (8 * sizeof(T) - 1);
  table["add.rn." + type] = binary<T, [](T a, T b) { return a + b; }>;
  table["sub.rn." + type] = binary<T, [](T a, T b) { return a - b; }>;
  table["mul.rn." + type] = binary<T, [](T a, T b) { return a * b; }>;
  table["div.rn." + type] = binary<T, [](T a, T b) { return a / b; }>;
  table["rcp.rn." + type] = unary<T, [](T a) { return 1 / a; }>;
  table["min." + type] = binary<T, lesser<T>>;
  table["max." + type] = binary<T, greater<T>>;
  table["neg." + type] = unary<Bits, [](Bits a) { return static_cast<Bits>(a ^ sign); }>;
  table["abs." + type] = unary<Bits, [](Bits a) { return static_cast<Bits>(a & ~sign); }>;
  comparisons<T>(table, type);
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

template <class To>
void conversions_to(Table& table, const std::string& to) {
  table["cvt." + to + ".u8"] = convert<To, uint8_t>;
  table["cvt." + to + ".s8"] = convert<To, int8_t>;
  table["cvt." + to + ".u16"] = convert<To, uint16_t>;
  table["cvt." + to + ".s16"] = convert<To, int16_t>;
  table["cvt." + to + ".u32"] = convert<To, uint32_t>;
  table["cvt." + to + ".s32"] = convert<To, int32_t>;
  table["cvt." + to + ".u64"] = convert<To, uint64_t>;
  table["cvt." + to + ".s64"] = convert<To, int64_t>;
}

/// Toward zero; beyond the integers the nearest one, and 0 of NaN.
template <class To, class From>
void truncate(Thread& t, const Instruction& i) {
  using Limits = std::numeric_limits<To>;
  const double x = std::trunc(static_cast<double>(t.read<From>(i.at[1])));
  const To value = x != x                                    ? To{0}
                   : x <= static_cast<double>(Limits::min()) ? Limits::min()
                   : x >= static_cast<double>(Limits::max()) ? Limits::max()
                                                             : static_cast<To>(x);
  t.write<To>(i.at[0], value);
}

template <class T>
void load(Thread& t, const Instruction& i) {
  const auto count = static_cast<size_t>(i.values);
  const std::byte* from = t.address(i, i.at[count], count * sizeof(T));
  for (size_t n = 0; n < count; ++n) {
    T value;
    std::memcpy(&value, from + n * sizeof(T), sizeof(T));
    t.set(i.at[n], static_cast<uint64_t>(value));
  }
}
template <class T>
void store(Thread& t, const Instruction& i) {
  const auto count = static_cast<size_t>(i.values);
  std::byte* to = t.address(i, i.at[count], count * sizeof(T));
  for (size_t n = 0; n < count; ++n) {
    const T value = t.read<T>(i.at[n]);
    std::memcpy(to + n * sizeof(T), &value, sizeof(T));
  }
}

template <class T>
void memory(Table& table, const std::string& type) {
  for (const char* vector : {"", "v2.", "v4."})
    for (const char* space : {"", "global.", "local.", "param."}) {
      table[std::string("ld.") + space + vector + type] = load<T>;
      if (space != std::string("param.")) {
        table[std::string("st.") + space + vector + type] = store<T>;
        table[std::string("st.volatile.") + space + vector + type] = store<T>;
      }
    }
}

void compare_and_swap(Thread& t, const Instruction& i) {
  std::byte* at = t.address(i, i.at[1], 4);
  uint32_t old;
  std::memcpy(&old, at, 4);
  const auto next = t.read<uint32_t>(i.at[3]);
  if (old == t.read<uint32_t>(i.at[2])) std::memcpy(at, &next, 4);
  t.write(i.at[0], old);
}

void nothing(Thread&, const Instruction&) {}

void atomic_max(Thread& t, const Instruction& i) {
  std::byte* at = t.address(i, i.at[1], sizeof(uint32_t));
  uint32_t before;
  std::memcpy(&before, at, sizeof before);
  const uint32_t after = std::max(before, t.read<uint32_t>(i.at[2]));
  std::memcpy(at, &after, sizeof after);
  t.set(i.at[0], before);
}

void branch(Thread& t, const Instruction& i) { t.next = i.target; }
void end(Thread& t, const Instruction&) { t.next = std::numeric_limits<std::size_t>::max(); }

void predicates(Table& table) {
  table["and.pred"] = binary<bool, [](bool a, bool b) { return a && b; }>;
  table["or.pred"] = binary<bool, [](bool a, bool b) { return a || b; }>;
  table["xor.pred"] = binary<bool, [](bool a, bool b) { return a != b; }>;
  table["not.pred"] = unary<bool, [](bool a) { return !a; }>;
  table["mov.pred"] = move<bool>;
}

template <class Unsigned, class Signed>
void of_width(Table& table, const std::string& width) {
  const std::string u = "u" + width, s = "s" + width, b = "b" + width;
  integers<Unsigned>(table, u);
  integers<Signed>(table, s);
  comparisons<Unsigned>(table, u);
  comparisons<Signed>(table, s);
  comparisons<Unsigned>(table, b);
  bits<Unsigned>(table, b);
  for (const std::string& type : {u, s, b}) moves<Unsigned>(table, type);
  conversions_to<Unsigned>(table, u);
  conversions_to<Signed>(table, s);
}

Table all() {
  Table table;
  of_width<uint16_t, int16_t>(table, "16");
  of_width<uint32_t, int32_t>(table, "32");
  of_width<uint64_t, int64_t>(table, "64");
  predicates(table);
  floats<float>(table, "f32");
  floats<double>(table, "f64");
  moves<uint32_t>(table, "f32");
  moves<uint64_t>(table, "f64");
  conversions_to<float>(table, "rn.f32");
  conversions_to<double>(table, "rn.f64");
  table["cvt.f64.f32"] = convert<double, float>;
  table["cvt.rn.f32.f64"] = convert<float, double>;
  table["cvt.rzi.s32.f32"] = truncate<int32_t, float>;
  table["cvt.rzi.u32.f32"] = truncate<uint32_t, float>;
  table["mul.wide.u16"] = multiply_wide<uint16_t, uint32_t>;
  table["mul.wide.s16"] = multiply_wide<int16_t, int32_t>;
  table["mul.wide.u32"] = multiply_wide<uint32_t, uint64_t>;
  table["mul.wide.s32"] = multiply_wide<int32_t, int64_t>;
  for (const char* type : {"u8", "b8"}) memory<uint8_t>(table, type);
  memory<int8_t>(table, "s8");
  for (const char* type : {"u16", "b16", "s16"}) memory<uint16_t>(table, type);
  for (const char* type : {"u32", "b32", "s32", "f32"}) memory<uint32_t>(table, type);
  for (const char* type : {"u64", "b64", "s64", "f64"}) memory<uint64_t>(table, type);
  table["atom.global.max.u32"] = atomic_max;
  table["atom.global.sys.cas.b32"] = compare_and_swap;
  table["membar.sys"] = nothing;
  table["fence.sc.sys"] = nothing;
  for (const char* name : {"cvta.to.global.u64", "cvta.global.u64", "cvta.to.local.u64", "cvta.local.u64"})
    table[name] = move<uint64_t>;
  table["bra"] = table["bra.uni"] = branch;
  table["ret"] = end;
  return table;
}

}  // namespace

Operation operation(const std::string& name) {
  static const Table table = all();
  const auto found = table.find(name);
  return found == table.end() ? nullptr : found->second;
}

}  // namespace quire::emulator
