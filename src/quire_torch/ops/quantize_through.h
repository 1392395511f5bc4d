// quire::quantize_through: quantization that gradients pass.
#pragma once

#include <utility>

#include "quire_torch/op/autograd.h"
#include "quire_torch/ops/quantize.h"

namespace quire_torch {

/// The six buffers of x, and a carrier: one element of x's dtype expanded to x's shape, zero, which is never read and
/// whose gradient is that of x, as if quantization were the identity (straight-through). At the border of a graph all
/// seven are plain tensors, and the tangent of the carrier is one.
struct QuantizeThrough : OpBase {
  static constexpr const char* kName = "quantize_through";
  using Args = Quantize::Args;
  static constexpr std::array kResults = before_buffers("carrier");
  static constexpr size_t kDifferentiable = 1;
  static constexpr bool kTwiceDifferentiable = true;
  struct Saved {
    at::ScalarType dtype;
    static constexpr auto kFields = std::tuple{op::field<&Saved::dtype>("dtype")};
  };

  static op::Tensors<7> inference(const Args& a);
  static std::pair<op::Tensors<7>, Saved> forward(const Args& a, op::Needs) {
    return {inference(a), {a.x.scalar_type()}};
  }
  static op::Tensors<6> backward(const Saved& s, const op::Tensors<7>& grads, op::Needs) {
    return {grads[0].to(s.dtype), {}, {}, {}, {}, {}};
  }
};

}  // namespace quire_torch
