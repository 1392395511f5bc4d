// The curve of an activation that is known at run time: of the reference of every device.
#pragma once

#include "quire/spec/activation.h"

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

}  // namespace quire
