// Arithmetic of float16 and bfloat16, one number or two in a register.
#include <algorithm>
#include <cmath>

#include "cuda/emulator/operations.h"
#include "cuda/emulator/small_floats.h"

namespace quire::emulator {
namespace {

/// a + b, with the last bit set where it is not exact: then rounding it again is as rounding once.
double sum_to_odd(double a, double b) {
  const double sum = a + b;
  const double of_b = sum - a, error = (a - (sum - of_b)) + (b - of_b);
  if (error == 0 || !std::isfinite(sum) || (std::bit_cast<uint64_t>(sum) & 1)) return sum;
  return std::nextafter(sum, error > 0 ? INFINITY : -INFINITY);
}

struct F16 {
  static double value(uint32_t bits) { return f16_value(bits); }
  static uint32_t code(double x) { return encode_small<kF16>(x); }
};
struct Bf16 {
  static double value(uint32_t bits) { return bf16_value(bits); }
  static uint32_t code(double x) { return encode_small<kBf16>(x); }
};

double plus(double a, double b, double) { return sum_to_odd(a, b); }
double minus(double a, double b, double) { return sum_to_odd(a, -b); }
double times(double a, double b, double) { return a * b; }
double fused(double a, double b, double c) { return sum_to_odd(a * b, c); }
double least(double a, double b, double) { return lesser(a, b); }
double most(double a, double b, double) { return greater(a, b); }
double least_or_nan(double a, double b, double) { return a != a || b != b ? double{NAN} : lesser(a, b); }
double most_or_nan(double a, double b, double) { return a != a || b != b ? double{NAN} : greater(a, b); }

/// Of `kCount` numbers in a register each.
template <class Half, int kCount, int kOperands, double (*kFunction)(double, double, double)>
const Instruction* half_operation(Thread& t, const Instruction& i) {
  uint32_t out = 0;
  for (int shift = 0; shift < 16 * kCount; shift += 16) {
    const auto operand = [&](int n) {
      if (n > kOperands) return 0.0;
      return Half::value(static_cast<uint32_t>(t.bits(i.at[static_cast<std::size_t>(n)]) >> shift) & 0xFFFF);
    };
    out |= Half::code(kFunction(operand(1), operand(2), operand(3))) << shift;
  }
  t.set(i.at[0], out);
  return &i + 1;
}

template <class Half, auto kCompare>
const Instruction* half_compare(Thread& t, const Instruction& i) {
  t.set(i.at[0], kCompare(Half::value(t.read<uint16_t>(i.at[1])), Half::value(t.read<uint16_t>(i.at[2]))));
  return &i + 1;
}

template <class Half, int kCount>
void add_count(Table& table, const std::string& type) {
  table["add.rn." + type] = half_operation<Half, kCount, 2, plus>;
  table["sub.rn." + type] = half_operation<Half, kCount, 2, minus>;
  table["mul.rn." + type] = half_operation<Half, kCount, 2, times>;
  table["fma.rn." + type] = half_operation<Half, kCount, 3, fused>;
  table["min." + type] = half_operation<Half, kCount, 2, least>;
  table["max." + type] = half_operation<Half, kCount, 2, most>;
  table["min.NaN." + type] = half_operation<Half, kCount, 2, least_or_nan>;
  table["max.NaN." + type] = half_operation<Half, kCount, 2, most_or_nan>;
  constexpr uint32_t signs = kCount == 2 ? 0x80008000 : 0x8000;
  table["neg." + type] = unary<uint32_t, [](uint32_t a) { return a ^ signs; }>;
  table["abs." + type] = unary<uint32_t, [](uint32_t a) { return a & ~signs; }>;
}

template <class Half>
void add_type(Table& table, const std::string& type) {
  add_count<Half, 1>(table, type);
  add_count<Half, 2>(table, type + "x2");
  table["setp.eq." + type] = half_compare<Half, [](double a, double b) { return a == b; }>;
  table["setp.ne." + type] = half_compare<Half, [](double a, double b) { return a < b || b < a; }>;
  table["setp.lt." + type] = half_compare<Half, [](double a, double b) { return a < b; }>;
  table["setp.le." + type] = half_compare<Half, [](double a, double b) { return a <= b; }>;
  table["setp.gt." + type] = half_compare<Half, [](double a, double b) { return b < a; }>;
  table["setp.ge." + type] = half_compare<Half, [](double a, double b) { return b <= a; }>;
  table["setp.neu." + type] = half_compare<Half, [](double a, double b) { return !(a == b); }>;
  table["setp.nan." + type] = half_compare<Half, [](double a, double b) { return a != a || b != b; }>;
}

}  // namespace

void add_halves(Table& table) {
  add_type<F16>(table, "f16");
  add_type<Bf16>(table, "bf16");
}

}  // namespace quire::emulator
