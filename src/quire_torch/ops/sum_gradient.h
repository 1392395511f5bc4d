// quire::sum_gradient: a parameter that every rank of a group has, used for this rank's tokens alone.
#pragma once

#include <utility>

#include "quire_torch/op/autograd.h"
#include "quire_torch/ops/parallel.h"

namespace quire_torch {

/// The values of t. Its gradient is the sum over the ranks that `parallel` names.
struct SumGradient : OpBase {
  static constexpr const char* kName = "sum_gradient";
  struct Args {
    at::Tensor t;
    OptionalParallelText parallel;
    static constexpr auto kFields = std::tuple{op::field<&Args::t>("t"), op::field<&Args::parallel>("parallel")};
  };
  static constexpr std::array kResults{"same"};
  static constexpr bool kComposite = true;
  struct Saved {
    OptionalParallelText parallel;
    static constexpr auto kFields = std::tuple{op::field<&Saved::parallel>("parallel")};
  };

  static op::Tensors<1> inference(const Args& a) {
    quire::check(a.parallel->has_value(), "sum_gradient: parallel must name a group, got ''");
    return {a.t.clone()};
  }
  static std::pair<op::Tensors<1>, Saved> forward(const Args& a, op::Needs) { return {inference(a), {a.parallel}}; }
  static op::Tensors<1> backward(const Saved& s, const op::Tensors<1>& grads, op::Needs) {
    return {sum(grads[0], (**s.parallel).group)};
  }
};

}  // namespace quire_torch
