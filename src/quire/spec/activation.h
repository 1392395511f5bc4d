// Activation functions as values with canonical text, and their formulas (numerics.md 11.3).
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

#include "quire/base/table.h"
#include "quire/spec/elementary.h"

namespace quire {

/// A function of one number; swish is x * sigmoid(alpha * x).
enum class Curve : uint8_t { sigmoid, gelu, swish, relu, squared_relu };

/// An activation is one row. A gated one takes [*, 2H], its curve of the first half times its second half.
struct ActivationRow {
  std::string_view name;
  Curve curve;
  bool gated = false;
  float alpha = 1;
  bool clamped = false;  ///< takes the parameters limit, alpha and glu_linear_offset

  /// Columns of the input for one column of the result.
  constexpr int64_t inputs() const { return gated ? 2 : 1; }
};

inline constexpr std::array<ActivationRow, 12> kActivations{{
    {"gelu", Curve::gelu},
    {"geglu", Curve::gelu, true},
    {"glu", Curve::sigmoid, true},
    {"qgelu", Curve::swish, false, 1.702f},
    {"qgeglu", Curve::swish, true, 1.702f},
    {"relu", Curve::relu},
    {"reglu", Curve::relu, true},
    {"srelu", Curve::squared_relu},
    {"sreglu", Curve::squared_relu, true},
    {"silu", Curve::swish},
    {"swiglu", Curve::swish, true},
    {"clamped_swiglu", Curve::swish, true, 1.702f, true},
}};

/// Immutable by convention. limit and offset act in a clamped activation only.
struct Activation {
  uint8_t kind = 0;  ///< index of kActivations
  float alpha = 1;
  float limit = 7;
  float offset = 1;

  /// Text such as "swiglu" or "clamped_swiglu:limit=7:alpha=1.702:glu_linear_offset=1" (parameters in any order, each
  /// may be left out). Throws Error naming what is allowed.
  static Activation parse(std::string_view text);
  /// Canonical: parse(a.to_string()) == a, parameters at their defaults left out.
  std::string to_string() const;

  bool operator==(const Activation&) const = default;

  /// The ActivationRow.
  constexpr decltype(auto) row() const { return entry<kActivations>(kind); }
  /// Columns of the input for one column of the result.
  constexpr int64_t inputs() const { return row().inputs(); }
};

/// A line per activation: "NAME INPUTS", followed by " PARAMETER" for each parameter that it takes.
std::string activation_table();

/// The value of a curve and its derivative.
struct CurvePoint {
  float value, slope;
};

/// x * sigmoid(g) and its derivative, where g is a function of x with derivative dg.
constexpr CurvePoint times_sigmoid(float x, float g, float dg) {
  const float s = sigmoid_f32(g), y = x * s;
  return {y, s + (y * (1.0f - s)) * dg};
}

/// The sigmoid of which gelu is x times: of x * (a + b * x * x).
struct GeluRule {
  // The tanh form: (1 + tanh(h)) / 2 is sigmoid(2 h). a = 2 sqrt(2 / pi), b = 0.044715 a.
  static constexpr float a = 0x1.988454p0f, b = 0x1.2444f2p-4f, b3 = 0x1.b6676cp-3f;
};

template <Curve C>
constexpr CurvePoint curve_at(float x, float alpha) {
  if constexpr (C == Curve::sigmoid) {
    const float s = sigmoid_f32(x);
    return {s, s * (1.0f - s)};
  } else if constexpr (C == Curve::gelu) {
    const float square = x * x;
    return times_sigmoid(x, x * (GeluRule::a + GeluRule::b * square), GeluRule::a + GeluRule::b3 * square);
  } else if constexpr (C == Curve::swish) {
    return times_sigmoid(x, alpha * x, alpha);
  } else {
    const float positive = x < 0.0f ? 0.0f : x, step = x > 0.0f ? 1.0f : 0.0f;
    if constexpr (C == Curve::relu) return {positive, step};
    static_assert(C == Curve::relu || C == Curve::squared_relu, "this curve has no formula yet");
    return {positive * positive, 2.0f * positive};
  }
}

}  // namespace quire
