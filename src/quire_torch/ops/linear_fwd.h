// y = x w^T + bias with x and w quantized. The inner forward operator: what training graphs contain.
#pragma once

#include "quire_torch/ops/operand.h"
#include "quire_torch/ops/quantize.h"

namespace quire_torch {

using OptionalTensors = op::OptionalTensorList;

/// Which operands linear_fwd keeps for backward, columnwise (bits of `save`).
inline constexpr int64_t kSaveX = 1, kSaveW = 2;

/// x [*, K] and w [N, K], both rowwise, give y [*, N] in `dtype` (numerics.md 6.1); N = out_features. Operands asked
/// for by `save` are quantized columnwise in the same pass and returned. x_buffers, w_buffers: the operand is given
/// already quantized, as six buffers, and nothing of it is returned. x then tells only shape and dtype; w is not
/// needed.
struct LinearFwd : OpBase {
  static constexpr const char* kName = "linear_fwd";
  static constexpr const char* kNotDifferentiable = "is an inner operator without a gradient; call quire.Linear";
  struct Args {
    at::Tensor x;
    std::optional<at::Tensor> w, bias;
    c10::SymInt out_features;
    RecipeText recipe;
    at::ScalarType dtype;
    int64_t save;
    OptionalTensors x_buffers, w_buffers;
    std::optional<at::Tensor> w_fingerprint{};
    static constexpr auto kFields = std::tuple{op::field<&Args::x>("x"),
                                               op::field<&Args::w>("w"),
                                               op::field<&Args::bias>("bias"),
                                               op::field<&Args::out_features>("out_features"),
                                               op::field<&Args::recipe>("recipe"),
                                               op::field<&Args::dtype>("dtype"),
                                               op::field<&Args::save>("save"),
                                               op::field<&Args::x_buffers>("x_buffers"),
                                               op::field<&Args::w_buffers>("w_buffers"),
                                               op::field<&Args::w_fingerprint>("w_fingerprint", "None")};
  };
  static constexpr std::array kResults{"y", "x_data", "x_scale", "x_amax", "w_data", "w_scale", "w_amax"};

  /// Rules that hold for shapes and dtypes, checked alike when tracing and when running.
  template <class Int>
  static void check_arguments(const Args& a) {
    check_input(a.x, "linear: x");
    const Int n = op::as<Int>(a.out_features), k = op::size<Int>(a.x, -1);
    quire::check(a.w.has_value() || !a.w_buffers.empty(), "linear: w is absent; pass it or w_buffers");
    if (a.w && a.w_buffers.empty()) {
      check_input(*a.w, "linear: w");
      quire::check(a.w->dim() == 2, "linear: w must be [out_features, in_features], got ", a.w->dim(), " dimensions");
      quire::check(k == op::size<Int>(*a.w, 1), "linear: x and w must agree on K; got x [..., ", k, "] and w [",
                   op::size<Int>(*a.w, 0), ", ", op::size<Int>(*a.w, 1), "]");
      quire::check(n == op::size<Int>(*a.w, 0), "linear: out_features must be w's first size, ", op::size<Int>(*a.w, 0),
                   ", got ", n);
      quire::check(a.x.device() == a.w->device(), "linear: x and w must be on one device; got ", a.x.device(), " and ",
                   a.w->device(), "; move one with .to()");
    }
    quire::check(dtype(a.dtype, "linear: dtype") != quire::DType::u8,
                 "linear: dtype must be float32, float16 or bfloat16");
    if (!a.bias) return;
    check_input(*a.bias, "linear: bias");
    quire::check(a.bias->dim() == 1 && op::size<Int>(*a.bias, 0) == n, "linear: bias must be [out_features] = [", n,
                 "], got ", op::sizes<Int>(*a.bias));
    quire::check(a.bias->device() == a.x.device(), "linear: bias and x must be on one device; got ", a.bias->device(),
                 " and ", a.x.device(), "; move one with .to()");
  }

  template <class Int>
  static std::array<op::Result<Int>, 7> results(const Args& a) {
    check_arguments<Int>(a);
    op::Result<Int> y{{}, a.dtype};
    const auto x = shape<Int>(a.x);
    y.sizes.append(x.begin(), x.end());
    y.sizes.back() = op::as<Int>(a.out_features);
    const auto [x_data, x_scale, x_amax] = kept<Int>(a.recipe->x, x, (a.save & kSaveX) && a.x_buffers.empty());
    const auto [w_data, w_scale, w_amax] =
        kept<Int>(a.recipe->w, {y.sizes.back(), x.back()}, (a.save & kSaveW) && a.w_buffers.empty());
    return {y, x_data, x_scale, x_amax, w_data, w_scale, w_amax};
  }

  static void run(const Args& a, op::Tensors<7>& out, const quire::Context& context);
};

}  // namespace quire_torch
