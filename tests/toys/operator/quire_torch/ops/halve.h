// The operator of a toy.
#pragma once

#include "quire/device/dispatch.h"
#include "quire_torch/bridge/context.h"
#include "quire_torch/op/fields.h"
#include "quire_torch/op/outputs.h"

namespace quire_torch {

/// y float32 = x / 2.
struct Halve {
  static constexpr const char *kNamespace = "toys", *kName = "halve", *kNotDifferentiable = "is a toy";
  using Context = CallContext;
  struct Args {
    at::Tensor x;
    static constexpr auto kFields = std::tuple{op::field<&Args::x>("x")};
  };
  static constexpr std::array kResults{"y"};

  template <class Int>
  static std::array<op::Result<Int>, 1> results(const Args& a) {
    quire::check(a.x.scalar_type() == at::kFloat, "halve: x must be float32, got ", a.x.scalar_type(),
                 "; convert it with .float()");
    const auto sizes = op::sizes<Int>(a.x);
    return {op::Result<Int>{{sizes.begin(), sizes.end()}, at::kFloat}};
  }
  static void run(const Args& a, op::Tensors<1>& out, const quire::Context& context) {
    const at::Tensor x = a.x.contiguous();
    const quire::HalveProblem problem{x.const_data_ptr<float>(), out[0].mutable_data_ptr<float>(), x.numel()};
    quire::dispatch(problem, context);
  }
};

}  // namespace quire_torch
