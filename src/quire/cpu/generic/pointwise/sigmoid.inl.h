// Curves that are made of a sigmoid, a piece at a time: the formulas of spec/activation.h in vector words.
#pragma once

#include "quire/cpu/generic/elements/plain.inl.h"
#include "quire/cpu/generic/elements/vectors.inl.h"

/// Elements between memory and memory.
constexpr int64_t kPiece = 256;

constexpr bool is_of_sigmoid(Curve c) { return c == Curve::sigmoid || c == Curve::gelu || c == Curve::swish; }

/// The negated argument of the curve's sigmoid.
template <Curve C>
inline F32 negated_argument(F32 x, float alpha) {
  if constexpr (C == Curve::sigmoid) return -x;
  if constexpr (C == Curve::swish) return x * -alpha;
  if constexpr (C == Curve::gelu) return x * (-GeluRule::a - GeluRule::b * (x * x));
}

/// Its derivative.
template <Curve C>
inline F32 argument_slope(F32 x, float alpha) {
  return C == Curve::swish ? broadcast(alpha) : GeluRule::a + GeluRule::b3 * (x * x);
}

template <class Body>
inline void for_each_vector(const Body& body) {
  for (int64_t j = 0; j < kPiece; j += kLanes) body(j);
}

/// Values of a curve at x, and its slopes with kSloped. A value is a chain of forty operations, most of which wait for
/// the one before; in stages of a few each, processors work on more vectors at once.
template <Curve C, bool kSloped>
inline void sigmoid_curve(float alpha, const float* __restrict x, float* __restrict value, float* __restrict slope) {
  using Rule = ExpRule;
  alignas(64) float v[kPiece], shifted[kPiece];
  // Up to e^-86 nothing is added to 1, so that 2^(n - 1) is always a normal number.
  for_each_vector(
      [&](int64_t j) { store(v + j, at_most(at_least(negated_argument<C>(load(x + j), alpha), -86.0f), 89.0f)); });
  for_each_vector([&](int64_t j) {
    const F32 each = load(v + j), sum = each * Rule::log2_e + Rule::rounder, n = sum - Rule::rounder;
    store(shifted + j, sum);
    store(v + j, (each - n * Rule::ln2_high) - n * Rule::ln2_low);
  });
  for_each_vector([&](int64_t j) {
    const F32 r = load(v + j);
    F32 p = broadcast(Rule::polynomial[0]);
#pragma GCC unroll 4
    for (int i = 1; i < 5; ++i) p = p * r + Rule::polynomial[i];
    store(v + j, ((p * r) * r + r) + 1.0f);
  });
  for_each_vector([&](int64_t j) {
    // Of the sum's bits all but the last ones, n, are shifted out.
    const F32 at = load(x + j), p = load(v + j), half_power = float_of((bits_of(load(shifted + j)) + 126u) << 23);
    const F32 s = 1.0f / (1.0f + (p + p) * half_power), y = C == Curve::sigmoid ? s : at * s;
    store(value + j, y);
    if constexpr (kSloped)
      store(slope + j, C == Curve::sigmoid ? s * (1.0f - s) : s + (y * (1.0f - s)) * argument_slope<C>(at, alpha));
  });
}
