#include <algorithm>
#include <array>
#include <bit>

#include "cuda/emulator/operations.h"

namespace quire::emulator {
namespace {

template <class T>
const Instruction* move(Thread& t, const Instruction& i) {
  t.set(i.at[0], t.read<T>(i.at[1]));
  return &i + 1;
}
template <class T>
const Instruction* select(Thread& t, const Instruction& i) {
  t.set(i.at[0], t.read<T>(t.bits(i.at[3]) ? i.at[1] : i.at[2]));
  return &i + 1;
}
/// a where c is not negative, else b.
template <class T, class C>
const Instruction* select_by_sign(Thread& t, const Instruction& i) {
  t.set(i.at[0], t.read<T>(t.read<C>(i.at[3]) >= 0 ? i.at[1] : i.at[2]));
  return &i + 1;
}

/// Of the parts of a register, the lowest first; the operands of both are in order of the text.
template <class Part>
const Instruction* pack(Thread& t, const Instruction& i) {
  uint64_t all = 0;
  for (int n = 1; n < i.values; ++n)
    all |= static_cast<uint64_t>(t.read<Part>(i.at[static_cast<std::size_t>(n)]))
           << (8 * sizeof(Part) * (static_cast<unsigned>(n) - 1));
  t.set(i.at[0], all);
  return &i + 1;
}
template <class Part>
const Instruction* unpack(Thread& t, const Instruction& i) {
  const auto count = static_cast<std::size_t>(i.values) - 1;
  const uint64_t all = t.bits(i.at[count]);
  for (std::size_t n = 0; n < count; ++n) t.set(i.at[n], static_cast<Part>(all >> (8 * sizeof(Part) * n)));
  return &i + 1;
}

template <class T>
const Instruction* shift_left(Thread& t, const Instruction& i) {
  const uint32_t by = t.read<uint32_t>(i.at[2]);
  t.write<T>(i.at[0], by >= 8 * sizeof(T) ? T{0} : static_cast<T>(t.read<T>(i.at[1]) << by));
  return &i + 1;
}
/// The low bits of a, `length` of them, at `position` of b.
template <class T>
const Instruction* insert_bits(Thread& t, const Instruction& i) {
  constexpr uint32_t bits = 8 * sizeof(T);
  const uint32_t position = t.read<uint32_t>(i.at[3]) & 255u, length = t.read<uint32_t>(i.at[4]) & 255u;
  const T ones = length >= bits ? static_cast<T>(~T{0}) : static_cast<T>((T{1} << length) - 1);
  const T mask = position >= bits ? T{0} : static_cast<T>(ones << position);
  const T moved = position >= bits ? T{0} : static_cast<T>(t.read<T>(i.at[1]) << position);
  t.write<T>(i.at[0], static_cast<T>((moved & mask) | (t.read<T>(i.at[2]) & ~mask)));
  return &i + 1;
}
/// Bits of a from `position` on, `length` of them; those beyond a, and above the last one, are 0 or a signed one's
/// sign.
template <class T>
const Instruction* extract_bits(Thread& t, const Instruction& i) {
  constexpr int bits = 8 * sizeof(T);
  using U = std::make_unsigned_t<T>;
  const T a = t.read<T>(i.at[1]);
  const int position = static_cast<int>(t.bits(i.at[2]) & 255), length = static_cast<int>(t.bits(i.at[3]) & 255);
  const int last = std::min(position + length - 1, bits - 1);
  const bool sign = std::is_signed_v<T> && length > 0 && (static_cast<U>(a) >> last & 1);
  U out = 0;
  for (int n = 0; n < bits; ++n) {
    const bool one = n < length && position + n < bits ? static_cast<U>(a) >> (position + n) & 1 : sign;
    out = static_cast<U>(out | (U{one} << n));
  }
  t.write<T>(i.at[0], static_cast<T>(out));
  return &i + 1;
}

const Instruction* logic3(Thread& t, const Instruction& i) {
  const auto a = t.read<uint32_t>(i.at[1]), b = t.read<uint32_t>(i.at[2]), c = t.read<uint32_t>(i.at[3]);
  const uint64_t table = t.bits(i.at[4]);
  uint32_t out = 0;
  for (unsigned n = 0; n < 8; ++n)
    if (table >> n & 1) out |= (n & 4 ? a : ~a) & (n & 2 ? b : ~b) & (n & 1 ? c : ~c);
  t.set(i.at[0], out);
  return &i + 1;
}

/// Of the 64 bits b, a. Clamped: at most 32.
template <bool kLeft, bool kClamp>
const Instruction* funnel_shift(Thread& t, const Instruction& i) {
  const uint64_t both = uint64_t{t.read<uint32_t>(i.at[2])} << 32 | t.read<uint32_t>(i.at[1]);
  const uint32_t c = t.read<uint32_t>(i.at[3]), by = kClamp ? std::min(c, 32u) : c & 31;
  t.set(i.at[0], static_cast<uint32_t>(kLeft ? (both << by) >> 32 : both >> by));
  return &i + 1;
}

enum class Permute { bytes, forward4, backward4, repeat8, edge_left, edge_right, repeat16 };

/// Which of the eight bytes of b, a comes to each place.
template <Permute kMode>
const Instruction* permute(Thread& t, const Instruction& i) {
  const uint64_t both = uint64_t{t.read<uint32_t>(i.at[2])} << 32 | t.read<uint32_t>(i.at[1]);
  const uint32_t control = t.read<uint32_t>(i.at[3]), n = control & 3;
  uint32_t out = 0;
  for (uint32_t place = 0; place < 4; ++place) {
    uint32_t from = 0;
    switch (kMode) {
      case Permute::bytes:
        from = control >> (4 * place) & 15;
        break;
      case Permute::forward4:
        from = n + place;
        break;
      case Permute::backward4:
        from = (n - place) & 7;
        break;
      case Permute::repeat8:
        from = n;
        break;
      case Permute::edge_left:
        from = std::max(place, n);
        break;
      case Permute::edge_right:
        from = std::min(place, n);
        break;
      case Permute::repeat16:
        from = (n & 1) * 2 + (place & 1);
        break;
    }
    const auto byte = static_cast<uint8_t>(both >> (8 * (from & 7)));
    const uint32_t value = from & 8 ? (byte & 0x80 ? 0xFFu : 0u) : byte;
    out |= value << (8 * place);
  }
  t.set(i.at[0], out);
  return &i + 1;
}

/// The position of the highest bit that is not the sign; all ones where there is none. shift: how far from the top.
template <class T, bool kShift>
uint32_t highest(T a) {
  using U = std::make_unsigned_t<T>;
  const U bits = static_cast<U>(a < T{0} ? ~a : a);
  if (bits == 0) return 0xFFFFFFFF;
  const auto zeros = static_cast<uint32_t>(std::countl_zero(bits));
  return kShift ? zeros : static_cast<uint32_t>(8 * sizeof(T)) - 1 - zeros;
}

template <class T>
T reversed(T a) {
  T out = 0;
  for (std::size_t n = 0; n < 8 * sizeof(T); ++n) out = static_cast<T>(out << 1 | (a >> n & 1));
  return out;
}

template <class T>
void add_width(Table& table, const std::string& width) {
  const std::string b = "b" + width;
  table["and." + b] = binary<T, [](T x, T y) { return static_cast<T>(x & y); }>;
  table["or." + b] = binary<T, [](T x, T y) { return static_cast<T>(x | y); }>;
  table["xor." + b] = binary<T, [](T x, T y) { return static_cast<T>(x ^ y); }>;
  table["not." + b] = unary<T, [](T x) { return static_cast<T>(~x); }>;
  table["cnot." + b] = unary<T, [](T x) { return static_cast<T>(x == 0); }>;
  table["shl." + b] = shift_left<T>;
  for (const char* type : {"b", "u", "s", "f"}) {
    table["mov." + (type + width)] = move<T>;
    table["selp." + (type + width)] = select<T>;
    table["slct." + (type + width) + ".s32"] = select_by_sign<T, int32_t>;
    table["slct." + (type + width) + ".f32"] = select_by_sign<T, float>;
  }
}

template <class T>
void add_wide_only(Table& table, const std::string& width) {
  using S = std::make_signed_t<T>;
  table["bfi.b" + width] = insert_bits<T>;
  table["bfe.u" + width] = extract_bits<T>;
  table["bfe.s" + width] = extract_bits<S>;
  table["brev.b" + width] = unary<T, reversed<T>>;
  table["popc.b" + width] = mapped<uint32_t, T, [](T x) { return static_cast<uint32_t>(std::popcount(x)); }>;
  table["clz.b" + width] = mapped<uint32_t, T, [](T x) { return static_cast<uint32_t>(std::countl_zero(x)); }>;
  table["bfind.u" + width] = mapped<uint32_t, T, highest<T, false>>;
  table["bfind.s" + width] = mapped<uint32_t, S, highest<S, false>>;
  table["bfind.shiftamt.u" + width] = mapped<uint32_t, T, highest<T, true>>;
  table["bfind.shiftamt.s" + width] = mapped<uint32_t, S, highest<S, true>>;
}

void add_predicates(Table& table) {
  table["and.pred"] = binary<bool, [](bool a, bool b) { return a && b; }>;
  table["or.pred"] = binary<bool, [](bool a, bool b) { return a || b; }>;
  table["xor.pred"] = binary<bool, [](bool a, bool b) { return a != b; }>;
  table["not.pred"] = unary<bool, [](bool a) { return !a; }>;
  table["mov.pred"] = move<bool>;
  table["selp.pred"] = select<bool>;
}

}  // namespace

void add_bit_operations(Table& table) {
  add_width<uint16_t>(table, "16");
  add_width<uint32_t>(table, "32");
  add_width<uint64_t>(table, "64");
  add_wide_only<uint32_t>(table, "32");
  add_wide_only<uint64_t>(table, "64");
  add_predicates(table);
  // The parser's names for moves of registers to their parts and back.
  table["pack.b8"] = pack<uint8_t>;
  table["pack.b16"] = pack<uint16_t>;
  table["pack.b32"] = pack<uint32_t>;
  table["unpack.b8"] = unpack<uint8_t>;
  table["unpack.b16"] = unpack<uint16_t>;
  table["unpack.b32"] = unpack<uint32_t>;
  table["lop3.b32"] = logic3;
  table["shf.l.wrap.b32"] = funnel_shift<true, false>;
  table["shf.r.wrap.b32"] = funnel_shift<false, false>;
  table["shf.l.clamp.b32"] = funnel_shift<true, true>;
  table["shf.r.clamp.b32"] = funnel_shift<false, true>;
  table["prmt.b32"] = permute<Permute::bytes>;
  table["prmt.b32.f4e"] = permute<Permute::forward4>;
  table["prmt.b32.b4e"] = permute<Permute::backward4>;
  table["prmt.b32.rc8"] = permute<Permute::repeat8>;
  table["prmt.b32.ecl"] = permute<Permute::edge_left>;
  table["prmt.b32.ecr"] = permute<Permute::edge_right>;
  table["prmt.b32.rc16"] = permute<Permute::repeat16>;
}

}  // namespace quire::emulator
