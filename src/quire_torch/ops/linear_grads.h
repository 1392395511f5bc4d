// The two products of linear_bwd apart, of operands that are quantized already: where something else is to happen
// between them, such as the reduction of dx over ranks.
#pragma once

#include "quire_torch/ops/linear_bwd.h"

namespace quire_torch {

/// dx = dy rowwise * w columnwise, of `shape` [*, K], in `dtype` (numerics.md 6.1). dy_*: rowwise buffers of dy [*, N].
/// w_buffers: as linear_bwd takes them, of one group.
struct LinearDgrad : OpBase {
  static constexpr const char* kName = "linear_dgrad";
  static constexpr const char* kNotDifferentiable = LinearBwd::kNotDifferentiable;
  struct Args {
    at::Tensor dy_data, dy_scale, dy_amax;
    OptionalTensors w_buffers;
    std::vector<c10::SymInt> shape;
    c10::SymInt out_features;
    RecipeText recipe;
    at::ScalarType dtype;
    static constexpr auto kFields =
        std::tuple{op::field<&Args::dy_data>("dy_data"), op::field<&Args::dy_scale>("dy_scale"),
                   op::field<&Args::dy_amax>("dy_amax"), op::field<&Args::w_buffers>("w_buffers"),
                   op::field<&Args::shape>("shape"),     op::field<&Args::out_features>("out_features"),
                   op::field<&Args::recipe>("recipe"),   op::field<&Args::dtype>("dtype")};
  };
  static constexpr std::array kResults{"dx"};

  template <class Int>
  static std::array<op::Result<Int>, 1> results(const Args& a) {
    quire::check(!a.shape.empty(), "linear_dgrad: shape must have at least 1 dimension, got []");
    check_result_dtype(a.dtype, "linear_dgrad: dtype");
    op::Result<Int> dx{{}, a.dtype};
    for (const auto& n : a.shape) dx.sizes.push_back(op::as<Int>(n));
    return {dx};
  }
  static void run(const Args& a, op::Tensors<1>& out, const quire::Context& context);
};

/// dw [N, K] = dy columnwise * x columnwise, in `dtype`, of columnwise buffers. tokens: rows of dy and x.
struct LinearWgrad : OpBase {
  static constexpr const char* kName = "linear_wgrad";
  static constexpr const char* kNotDifferentiable = LinearBwd::kNotDifferentiable;
  struct Args {
    at::Tensor dy_data, dy_scale, dy_amax;
    at::Tensor x_data, x_scale, x_amax;
    c10::SymInt tokens, out_features, in_features;
    RecipeText recipe;
    at::ScalarType dtype;
    static constexpr auto kFields = std::tuple{op::field<&Args::dy_data>("dy_data"),
                                               op::field<&Args::dy_scale>("dy_scale"),
                                               op::field<&Args::dy_amax>("dy_amax"),
                                               op::field<&Args::x_data>("x_data"),
                                               op::field<&Args::x_scale>("x_scale"),
                                               op::field<&Args::x_amax>("x_amax"),
                                               op::field<&Args::tokens>("tokens"),
                                               op::field<&Args::out_features>("out_features"),
                                               op::field<&Args::in_features>("in_features"),
                                               op::field<&Args::recipe>("recipe"),
                                               op::field<&Args::dtype>("dtype")};
  };
  static constexpr std::array kResults{"dw"};

  template <class Int>
  static std::array<op::Result<Int>, 1> results(const Args& a) {
    check_result_dtype(a.dtype, "linear_wgrad: dtype");
    return {op::Result<Int>{{op::as<Int>(a.out_features), op::as<Int>(a.in_features)}, a.dtype}};
  }
  static void run(const Args& a, op::Tensors<1>& out, const quire::Context& context);
};

/// A copy of `t` that a graph cannot make before `after` is there. Without it a partitioner moves what backward gathers
/// of `t` into the forward pass, and saves the gathered tensor instead of this rank's part.
struct Tie : OpBase {
  static constexpr const char* kName = "tie";
  static constexpr const char* kNotDifferentiable = LinearBwd::kNotDifferentiable;
  struct Args {
    at::Tensor t, after;
    static constexpr auto kFields = std::tuple{op::field<&Args::t>("t"), op::field<&Args::after>("after")};
  };
  static constexpr std::array kResults{"tied"};

  template <class Int>
  static std::array<op::Result<Int>, 1> results(const Args& a) {
    op::Result<Int> r{{}, a.t.scalar_type()};
    const auto sizes = op::sizes<Int>(a.t);
    r.sizes.append(sizes.begin(), sizes.end());
    return {r};
  }
  static void run(const Args& a, op::Tensors<1>& out, const quire::Context&) { out[0].copy_(a.t); }
};

}  // namespace quire_torch
