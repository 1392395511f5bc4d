// What the operations of PTX do (PTX ISA 9.0, chapter 9.7), in groups. What is not exact or may be contracted, such as
// "add.f32" without ".rn", is unknown.
#pragma once

#include <cmath>
#include <string>
#include <unordered_map>

#include "cuda/emulator/machine.h"

namespace quire::emulator {

using Table = std::unordered_map<std::string, Operation>;

void add_integers(Table& table);
void add_bit_operations(Table& table);
void add_floats(Table& table);
void add_halves(Table& table);
void add_conversions(Table& table);
void add_small_conversions(Table& table);
void add_memory(Table& table);
void add_atomics(Table& table);
void add_control(Table& table);
void add_warp_words(Table& table);
void add_tensor_words(Table& table);

/// An operation that ends with the next instruction.
template <auto kBody>
const Instruction* step(Thread& t, const Instruction& i) {
  kBody(t, i);
  return &i + 1;
}

template <class T, auto kFunction>
const Instruction* unary(Thread& t, const Instruction& i) {
  t.write<T>(i.at[0], kFunction(t.read<T>(i.at[1])));
  return &i + 1;
}
template <class T, auto kFunction>
const Instruction* binary(Thread& t, const Instruction& i) {
  t.write<T>(i.at[0], kFunction(t.read<T>(i.at[1]), t.read<T>(i.at[2])));
  return &i + 1;
}
template <class T, auto kFunction>
const Instruction* ternary(Thread& t, const Instruction& i) {
  t.write<T>(i.at[0], kFunction(t.read<T>(i.at[1]), t.read<T>(i.at[2]), t.read<T>(i.at[3])));
  return &i + 1;
}
/// From a number of one type to a number of another.
template <class To, class From, auto kFunction>
const Instruction* mapped(Thread& t, const Instruction& i) {
  t.write<To>(i.at[0], kFunction(t.read<From>(i.at[1])));
  return &i + 1;
}
template <class T, auto kCompare>
const Instruction* compare(Thread& t, const Instruction& i) {
  t.set(i.at[0], kCompare(t.read<T>(i.at[1]), t.read<T>(i.at[2])));
  return &i + 1;
}
template <class To, class From>
const Instruction* convert(Thread& t, const Instruction& i) {
  t.write<To>(i.at[0], static_cast<To>(t.read<From>(i.at[1])));
  return &i + 1;
}

template <class T>
void add_comparisons(Table& table, const std::string& type) {
  table["setp.eq." + type] = compare<T, [](T a, T b) { return a == b; }>;
  table["setp.ne." + type] = compare<T, [](T a, T b) { return a < b || b < a; }>;
  table["setp.lt." + type] = compare<T, [](T a, T b) { return a < b; }>;
  table["setp.le." + type] = compare<T, [](T a, T b) { return a <= b; }>;
  table["setp.gt." + type] = compare<T, [](T a, T b) { return b < a; }>;
  table["setp.ge." + type] = compare<T, [](T a, T b) { return b <= a; }>;
}

/// Of two numbers one of which is NaN the other one; -0 is below +0.
template <class T>
constexpr T lesser(T a, T b) {
  if (a != a || b != b) return a != a ? b : a;
  return a < b || (a == b && std::signbit(a)) ? a : b;
}
template <class T>
constexpr T greater(T a, T b) {
  if (a != a || b != b) return a != a ? b : a;
  return a > b || (a == b && !std::signbit(a)) ? a : b;
}

}  // namespace quire::emulator
