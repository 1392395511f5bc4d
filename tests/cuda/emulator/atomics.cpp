#include <algorithm>
#include <cmath>

#include "cuda/emulator/operations.h"
#include "cuda/emulator/shared_memory.h"

namespace quire::emulator {
namespace {

template <class T, Space kSpace, auto kFunction>
const Instruction* atomic(Thread& t, const Instruction& i) {
  std::byte* at = t.address(kSpace, i, i.at[1], sizeof(T), Touch::atomic);
  T before;
  std::memcpy(&before, at, sizeof(T));
  const T after = kFunction(before, t.read<T>(i.at[2]), t.read<T>(i.at[3]));
  std::memcpy(at, &after, sizeof(T));
  if constexpr (std::is_floating_point_v<T>)
    t.write<T>(i.at[0], before);
  else
    t.set(i.at[0], static_cast<uint64_t>(before));
  return &i + 1;
}

template <class T>
T sum(T a, T b, T) {
  return static_cast<T>(a + b);
}
template <class T>
T least(T a, T b, T) {
  return std::min(a, b);
}
template <class T>
T most(T a, T b, T) {
  return std::max(a, b);
}
template <class T>
T both(T a, T b, T) {
  return static_cast<T>(a & b);
}
template <class T>
T either(T a, T b, T) {
  return static_cast<T>(a | b);
}
template <class T>
T differing(T a, T b, T) {
  return static_cast<T>(a ^ b);
}
template <class T>
T exchanged(T, T b, T) {
  return b;
}
template <class T>
T compared(T a, T b, T c) {
  return a == b ? c : a;
}
uint32_t counted_up(uint32_t a, uint32_t b, uint32_t) { return a >= b ? 0 : a + 1; }
uint32_t counted_down(uint32_t a, uint32_t b, uint32_t) { return a == 0 || a > b ? b : a - 1; }

/// In global memory subnormal numbers of float32 are 0.
float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }
float flushed_sum(float a, float b, float) { return flushed(flushed(a) + flushed(b)); }

template <Space kSpace>
const Instruction* add_of_f32(Thread& t, const Instruction& i) {
  const bool in_shared = kSpace == Space::shared || (t.bits(i.at[1]) & kSpaceMask) == kShared;
  return in_shared ? atomic<float, kSpace, sum<float>>(t, i) : atomic<float, kSpace, flushed_sum>(t, i);
}

template <class Unsigned, class Signed, Space kSpace>
void add_width(Table& table, const std::string& name, const std::string& width) {
  table[name + "add.u" + width] = table[name + "add.s" + width] = atomic<Unsigned, kSpace, sum<Unsigned>>;
  table[name + "min.u" + width] = atomic<Unsigned, kSpace, least<Unsigned>>;
  table[name + "max.u" + width] = atomic<Unsigned, kSpace, most<Unsigned>>;
  table[name + "min.s" + width] = atomic<Signed, kSpace, least<Signed>>;
  table[name + "max.s" + width] = atomic<Signed, kSpace, most<Signed>>;
  table[name + "and.b" + width] = atomic<Unsigned, kSpace, both<Unsigned>>;
  table[name + "or.b" + width] = atomic<Unsigned, kSpace, either<Unsigned>>;
  table[name + "xor.b" + width] = atomic<Unsigned, kSpace, differing<Unsigned>>;
  table[name + "exch.b" + width] = atomic<Unsigned, kSpace, exchanged<Unsigned>>;
  table[name + "cas.b" + width] = atomic<Unsigned, kSpace, compared<Unsigned>>;
}

template <Space kSpace>
void add_space(Table& table, const std::string& space) {
  const std::string name = "atom." + space;
  add_width<uint32_t, int32_t, kSpace>(table, name, "32");
  add_width<uint64_t, int64_t, kSpace>(table, name, "64");
  table[name + "cas.b16"] = atomic<uint16_t, kSpace, compared<uint16_t>>;
  table[name + "inc.u32"] = atomic<uint32_t, kSpace, counted_up>;
  table[name + "dec.u32"] = atomic<uint32_t, kSpace, counted_down>;
  table[name + "add.f32"] = add_of_f32<kSpace>;
  table[name + "add.f64"] = atomic<double, kSpace, sum<double>>;
}

}  // namespace

void add_atomics(Table& table) {
  add_space<Space::generic>(table, "");
  add_space<Space::global>(table, "global.");
  add_space<Space::shared>(table, "shared.");
}

}  // namespace quire::emulator
