// Activations that are known at run time, an element at a time (numerics.md 11.3): the reference of every device.
#pragma once

#include "quire/spec/activation.h"
#include "quire/spec/matrix_element.h"

namespace quire {

constexpr CurvePoint point_of(const Activation& a, float x) {
  switch (a.row().curve) {
    case Curve::sigmoid:
      return curve_at<Curve::sigmoid>(x, a.alpha);
    case Curve::gelu:
      return curve_at<Curve::gelu>(x, a.alpha);
    case Curve::swish:
      return curve_at<Curve::swish>(x, a.alpha);
    case Curve::relu:
      return curve_at<Curve::relu>(x, a.alpha);
    case Curve::squared_relu:
      return curve_at<Curve::squared_relu>(x, a.alpha);
  }
  return {};
}

/// What an activation makes of an element of its argument and, if it is gated, of the factor beside it.
struct ActivationPoint {
  CurvePoint point{};
  float up = 1;
  bool gated = false;
  bool x_moves = true, up_moves = true;  ///< whether the result follows them: not beyond the limit

  constexpr float value() const { return gated ? up * point.value : point.value; }
  /// The gradients of the two.
  constexpr float x_grad(float dy) const { return x_moves ? (gated ? dy * up : dy) * point.slope : 0.0f; }
  constexpr float up_grad(float dy) const { return up_moves ? dy * point.value : 0.0f; }
};

/// Of the element of the result at (row, col).
QUIRE_HOST_DEVICE inline ActivationPoint activation_at(const Activation& a, const Matrix& x, int64_t row, int64_t col) {
  const ActivationRow kind = a.row();
  ActivationPoint out{.gated = kind.gated};
  float value = load_element(x, row, col);
  if (kind.gated) out.up = load_element(x, row, x.cols / 2 + col);
  if (kind.clamped) {
    out.x_moves = !(value > a.limit);
    if (!out.x_moves) value = a.limit;
    out.up_moves = !(out.up > a.limit || out.up < -a.limit);
    if (!out.up_moves) out.up = out.up > 0 ? a.limit : -a.limit;
    out.up += a.offset;
  }
  out.point = point_of(a, value);
  return out;
}

}  // namespace quire
