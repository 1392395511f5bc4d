// Activations that are known at run time, an element at a time (numerics.md 11.3): the reference of every device.
#pragma once

#include <type_traits>

#include "quire/spec/activation.h"
#include "quire/spec/matrix_element.h"

namespace quire {

/// body(curve as an integral_constant).
template <class Body>
constexpr auto with_curve(Curve curve, const Body& body) {
  switch (curve) {
    case Curve::sigmoid:
      return body(std::integral_constant<Curve, Curve::sigmoid>());
    case Curve::gelu:
      return body(std::integral_constant<Curve, Curve::gelu>());
    case Curve::swish:
      return body(std::integral_constant<Curve, Curve::swish>());
    case Curve::relu:
      return body(std::integral_constant<Curve, Curve::relu>());
    default:
      return body(std::integral_constant<Curve, Curve::squared_relu>());
  }
}

constexpr CurvePoint point_of(const Activation& a, float x) {
  return with_curve(a.row().curve, [&](auto curve) { return curve_at<curve>(x, a.alpha); });
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

/// Of x and, if it is gated, up. curve(x): a point of the activation's curve; kind: a.row().
template <class PointOf>
constexpr ActivationPoint activation_of(const ActivationRow& kind, const Activation& a, float x, float up,
                                        const PointOf& curve) {
  ActivationPoint out{.up = up, .gated = kind.gated};
  if (kind.clamped) {
    out.x_moves = !(x > a.limit);
    if (!out.x_moves) x = a.limit;
    out.up_moves = !(up > a.limit || up < -a.limit);
    if (!out.up_moves) out.up = up > 0 ? a.limit : -a.limit;
    out.up += a.offset;
  }
  out.point = curve(x);
  return out;
}

/// Of the element of the result at (row, col).
QUIRE_HOST_DEVICE inline ActivationPoint activation_at(const Activation& a, const Matrix& x, int64_t row, int64_t col) {
  const ActivationRow kind = a.row();
  const float up = kind.gated ? load_element(x, row, x.cols / 2 + col) : 1.0f;
  return activation_of(kind, a, load_element(x, row, col), up, [&](float value) { return point_of(a, value); });
}

}  // namespace quire
