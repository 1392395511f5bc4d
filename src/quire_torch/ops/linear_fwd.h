// y = x w^T + bias with x and w quantized. The inner forward operator: what training graphs contain.
#pragma once

#include "quire_torch/ops/quantize.h"

namespace quire_torch {

using OptionalTensors = op::OptionalTensorList;

/// Which operands linear_fwd keeps for backward, columnwise (bits of `save`).
inline constexpr int64_t kSaveX = 1, kSaveW = 2;

/// x [*, K] and w [N, K], both rowwise, give y [*, N] in `dtype` (numerics.md 6.1). Operands asked for by `save` are
/// quantized columnwise in the same pass and returned.
/// x_buffers, w_buffers: the operand is given already quantized, as six buffers; x and w then tell only shape and
/// dtype. x_scale, w_scale: given scales (delayed scaling); the operand's amax is returned. output_spec: y is returned
/// quantized rowwise as (y, y_scale, y_amax).
struct LinearFwd : OpBase {
  static constexpr const char* kName = "linear_fwd";
  static constexpr const char* kNotDifferentiable = "is an inner operator without a gradient; call quire.Linear";
  struct Args {
    at::Tensor x, w;
    std::optional<at::Tensor> bias;
    RecipeText recipe;
    at::ScalarType dtype;
    int64_t save;
    OptionalTensors x_buffers{}, w_buffers{};
    std::optional<at::Tensor> x_scale{}, w_scale{};
    OptionalSpecText output_spec = OptionalSpecText::parse("");
    static constexpr auto kFields = std::tuple{op::field<&Args::x>("x"),
                                               op::field<&Args::w>("w"),
                                               op::field<&Args::bias>("bias"),
                                               op::field<&Args::recipe>("recipe"),
                                               op::field<&Args::dtype>("dtype"),
                                               op::field<&Args::save>("save"),
                                               op::field<&Args::x_buffers>("x_buffers"),
                                               op::field<&Args::w_buffers>("w_buffers"),
                                               op::field<&Args::x_scale>("x_scale", "None"),
                                               op::field<&Args::w_scale>("w_scale", "None"),
                                               op::field<&Args::output_spec>("output_spec", "\"\"")};
  };
  static constexpr std::array kResults{"y",      "y_scale", "y_amax",  "x_data", "x_scale",
                                       "x_amax", "w_data",  "w_scale", "w_amax"};

  /// Rules that hold for shapes and dtypes, checked alike when tracing and when running.
  template <class Int>
  static void check_arguments(const Args& a) {
    check_input(a.x, "linear: x");
    check_input(a.w, "linear: w");
    quire::check(a.w.dim() == 2, "linear: w must be [out_features, in_features], got ", a.w.dim(), " dimensions");
    quire::check(op::size<Int>(a.x, -1) == op::size<Int>(a.w, 1), "linear: x and w must agree on K; got x [..., ",
                 op::size<Int>(a.x, -1), "] and w [", op::size<Int>(a.w, 0), ", ", op::size<Int>(a.w, 1), "]");
    quire::check(dtype(a.dtype, "linear: dtype") != quire::DType::u8,
                 "linear: dtype must be float32, float16 or bfloat16");
    quire::check(a.x.device() == a.w.device(), "linear: x and w must be on one device; got ", a.x.device(), " and ",
                 a.w.device(), "; move one with .to()");
    if (!a.bias) return;
    check_input(*a.bias, "linear: bias");
    quire::check(a.bias->dim() == 1 && op::size<Int>(*a.bias, 0) == op::size<Int>(a.w, 0),
                 "linear: bias must be [out_features] = [", op::size<Int>(a.w, 0), "], got ", op::sizes<Int>(*a.bias));
    quire::check(a.bias->device() == a.w.device(), "linear: bias and w must be on one device; got ", a.bias->device(),
                 " and ", a.w.device(), "; move one with .to()");
  }

  template <class Int>
  static std::array<op::Result<Int>, 9> results(const Args& a) {
    check_arguments<Int>(a);
    auto y = shape<Int>(a.x);
    y.back() = op::size<Int>(a.w, 0);
    const auto& out = a.output_spec->spec;
    auto q = quire_torch::results(out.value_or(quire::QuantSpec{}), y, quire::Direction::rowwise, out.has_value());
    if (!out) {
      q[0] = {{}, a.dtype};
      q[0].sizes.append(y.begin(), y.end());
    }
    const auto x = kept<Int>(a.x, a.recipe->x, (a.save & kSaveX) && a.x_buffers.empty(), a.x_scale.has_value());
    const auto w = kept<Int>(a.w, a.recipe->w, (a.save & kSaveW) && a.w_buffers.empty(), a.w_scale.has_value());
    return {q[0], q[1], q[2], x[0], x[1], x[2], w[0], w[1], w[2]};
  }

  /// Columnwise buffers if the operand is saved; its amax in any case under a given scale, which is updated from it.
  /// Scales are one-dimensional: of a result [ceil(M / 32), K] tracing would ask whether its first size is 1, and make
  /// a graph of its own for at most 32 tokens.
  template <class Int>
  static std::array<op::Result<Int>, 3> kept(const at::Tensor& t, const quire::QuantSpec& spec, bool save,
                                             bool given_scale) {
    auto r = quire_torch::results(spec, shape<Int>(t), quire::Direction::columnwise, save);
    if (save)
      r[1].sizes = {quire::product(quire::Shape<Int>(r[1].sizes.begin(), r[1].sizes.end()), 0, r[1].sizes.size())};
    if (given_scale) r[2] = {{Int(1)}, at::kFloat};
    return r;
  }
  static void cpu(const Args& a, op::Tensors<9>& out);
};

}  // namespace quire_torch
