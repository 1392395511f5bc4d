// Delayed scaling's update: from a history of amaxes to the next scale (numerics.md 1.4, 1.6, 0.3). Pure functions on
// floats; who calls them and when is the layer's business.
#pragma once

#include <algorithm>
#include <cstdint>

#include "quire/spec/scale.h"

namespace quire {

/// Which amax the new scale follows.
enum class AmaxAlgorithm : uint8_t { max, most_recent };

struct DelayedRule {
  AmaxAlgorithm algorithm = AmaxAlgorithm::max;
  float largest = 448;  ///< largest value of the element format: largest(Format)
  int margin = 0;       ///< powers of two kept free above the amax
};

/// Amaxes of one slot: row 0 collects the current step, the newest finished one is in the last row. A column of a
/// [length, slots] matrix has stride `slots`.
struct AmaxHistory {
  float* data = nullptr;
  int64_t length = 0;
  int64_t stride = 1;

  constexpr float& operator[](int64_t i) const { return data[i * stride]; }
};

/// The greater of two; NaN is ignored, and of equal ones the first stays.
constexpr float maximum_of(float a, float b) { return b > a || a != a ? b : a; }

/// The amax that a step adds to a slot's history: `reduced` is row 0 after a reduction over devices; without one, row 0
/// itself. 0: the slot saw nothing.
constexpr float finished_amax(float reduced, float row_0) { return reduced != 0 ? reduced : row_0; }

/// The scale that follows from an amax. One that is not finite keeps the scale.
constexpr float next_scale(const DelayedRule& rule, float amax, float scale) {
  if (!is_finite(amax) || !(amax > 0)) return scale;
  // Exact in float64; beyond 2^1000 all margins give the same float32.
  const int exponent = std::clamp(-rule.margin, -1000, 1000);
  const float largest = static_cast<float>(static_cast<double>(rule.largest) * power_of_two(exponent));
  const float next = largest / amax;
  return is_finite(next) ? next : kFloatMax;
}

/// Ends a step: rolls the history and returns the next scale. A slot that saw nothing keeps its history and its scale.
/// length >= 1.
constexpr float delayed_update(const DelayedRule& rule, AmaxHistory history, float reduced, float scale) {
  const float last = finished_amax(reduced, history[0]);
  if (last == 0) return scale;
  float amax = last;
  if (rule.algorithm == AmaxAlgorithm::max)
    for (int64_t i = 1; i < history.length; ++i) amax = maximum_of(amax, history[i]);
  for (int64_t i = 1; i + 1 < history.length; ++i) history[i] = history[i + 1];
  history[history.length - 1] = last;
  history[0] = 0;
  return next_scale(rule, amax, scale);
}

}  // namespace quire
