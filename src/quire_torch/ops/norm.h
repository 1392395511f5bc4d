// quire::norm: LayerNorm and RMSNorm of the last dimension, whose result may be quantized as it is computed.
#pragma once

#include <utility>

#include "quire_torch/op/autograd.h"
#include "quire_torch/ops/produced.h"

namespace quire_torch {

/// "LayerNorm" or "RMSNorm".
struct Normalization {
  quire::NormKind kind = quire::NormKind::layer;

  static Normalization parse(std::string_view text);
  std::string_view text() const { return quire::name(kind); }
};

/// x [*, K], weight [K], bias [K] in weight's dtype or none (numerics.md 11.2) -> y [*, K] in `dtype`, or with a spec
/// its buffers (numerics.md 1-5), or both with `keep`.
struct NormArgs {
  at::Tensor x, weight;
  std::optional<at::Tensor> bias;
  Normalization normalization;
  double eps;
  bool zero_centered;
  at::ScalarType dtype;
  OptionalSpecText spec = OptionalSpecText::parse("");
  bool rowwise = false, columnwise = false, keep = false;
  std::optional<at::Tensor> scale{};
  static constexpr auto kFields = std::tuple{op::field<&NormArgs::x>("x"),
                                             op::field<&NormArgs::weight>("weight"),
                                             op::field<&NormArgs::bias>("bias"),
                                             op::field<&NormArgs::normalization>("normalization"),
                                             op::field<&NormArgs::eps>("eps"),
                                             op::field<&NormArgs::zero_centered>("zero_centered"),
                                             op::field<&NormArgs::dtype>("dtype"),
                                             op::field<&NormArgs::spec>("spec", "\"\""),
                                             op::field<&NormArgs::rowwise>("rowwise", "False"),
                                             op::field<&NormArgs::columnwise>("columnwise", "False"),
                                             op::field<&NormArgs::keep>("keep_y", "False"),
                                             op::field<&NormArgs::scale>("scale", "None")};

  ProducedFields out() const { return {dtype, spec, rowwise, columnwise, keep, scale}; }
};

/// The inner forward operator. mean and rstd [M], float32, are for backward; RMSNorm has no mean.
struct NormFwd : OpBase {
  static constexpr const char* kName = "norm_fwd";
  static constexpr const char* kNotDifferentiable =
      "is an inner operator without a gradient; call quire.LayerNorm or quire.RMSNorm";
  using Args = NormArgs;
  static constexpr std::array kResults{
      "y",    "rowwise_data", "rowwise_scale", "rowwise_amax", "columnwise_data", "columnwise_scale", "columnwise_amax",
      "mean", "rstd"};

  template <class Int>
  static std::array<op::Result<Int>, 9> results(const Args& a) {
    check_input(a.x, "norm: x");
    check_parameter<Int>(a.x, a.weight, "norm: weight");
    if (a.bias) {
      check_parameter<Int>(a.x, *a.bias, "norm: bias");
      quire::check(a.bias->scalar_type() == a.weight.scalar_type(), "norm: bias must have the dtype of weight; got ",
                   a.bias->scalar_type(), " and ", a.weight.scalar_type(), "; convert one with .to()");
    }
    const auto sizes = shape<Int>(a.x);
    const auto r = produced_results(a.out(), sizes, "norm");
    const op::Result<Int> rows{{quire::product(sizes, 0, sizes.size() - 1)}, at::kFloat};
    const bool has_mean = a.normalization.kind == quire::NormKind::layer;
    return {r[0], r[1], r[2], r[3], r[4], r[5], r[6], has_mean ? rows : op::absent<Int>(at::kFloat), rows};
  }
  static void run(const Args& a, op::Tensors<9>& out, const quire::Context& context);

  template <class Int>
  static void check_parameter(const at::Tensor& x, const at::Tensor& t, const char* what) {
    check_input(t, what);
    quire::check(t.dim() == 1 && op::size<Int>(t, 0) == op::size<Int>(x, -1), what, " must be [hidden_size] = [",
                 op::size<Int>(x, -1), "], the last dimension of x; got ", op::sizes<Int>(t));
    check_one_device(t.device(), x.device(), what, " and x");
  }
};

/// Which gradients norm_bwd computes (bits of `needs`); the others are absent.
inline constexpr int64_t kNeedsNormX = 1, kNeedsNormWeight = 2, kNeedsNormBias = 4;

/// dx like x, dweight and dbias like weight, of a norm that gave mean and rstd (numerics.md 11.2).
struct NormBwd : OpBase {
  static constexpr const char* kName = "norm_bwd";
  static constexpr auto kText = op::gradient_of("norm");
  static constexpr const char* kNotDifferentiable = kText.data();
  struct Args {
    at::Tensor dy, x, weight, mean, rstd;
    Normalization normalization;
    bool zero_centered;
    int64_t needs;
    static constexpr auto kFields = std::tuple{op::field<&Args::dy>("dy"),
                                               op::field<&Args::x>("x"),
                                               op::field<&Args::weight>("weight"),
                                               op::field<&Args::mean>("mean"),
                                               op::field<&Args::rstd>("rstd"),
                                               op::field<&Args::normalization>("normalization"),
                                               op::field<&Args::zero_centered>("zero_centered"),
                                               op::field<&Args::needs>("needs")};
  };
  static constexpr std::array kResults{"dx", "dweight", "dbias"};

  template <class Int>
  static std::array<op::Result<Int>, 3> results(const Args& a) {
    check_input(a.dy, "norm_bwd: dy");
    check_input(a.x, "norm_bwd: x");
    NormFwd::check_parameter<Int>(a.x, a.weight, "norm_bwd: weight");
    const auto like = [&](int64_t bit, const at::Tensor& t) {
      op::Result<Int> r = op::absent<Int>(t.scalar_type());
      if (a.needs & bit) r.sizes.assign(op::sizes<Int>(t).begin(), op::sizes<Int>(t).end());
      return r;
    };
    return {like(kNeedsNormX, a.x), like(kNeedsNormWeight, a.weight), like(kNeedsNormBias, a.weight)};
  }
  static void run(const Args& a, op::Tensors<3>& out, const quire::Context& context);
};

/// The differentiable operator. Where y is not wanted it is a carrier, with_carrier().
struct Norm : OpBase {
  static constexpr const char* kName = "norm";
  using Args = NormArgs;
  static constexpr auto kResults = kProducedResults;
  static constexpr size_t kDifferentiable = 1;

  struct Saved {
    at::Tensor x, weight, mean, rstd;
    Normalization normalization;
    bool zero_centered;
    static constexpr auto kFields = std::tuple{op::field<&Saved::x>("x"),
                                               op::field<&Saved::weight>("weight"),
                                               op::field<&Saved::mean>("mean"),
                                               op::field<&Saved::rstd>("rstd"),
                                               op::field<&Saved::normalization>("normalization"),
                                               op::field<&Saved::zero_centered>("zero_centered")};
  };

  static op::Tensors<7> inference(const Args& a);
  static std::pair<op::Tensors<7>, Saved> forward(const Args& a, op::Needs need);
  static op::Tensors<4> backward(const Saved& s, const op::Tensors<7>& grads, op::Needs need);
};

}  // namespace quire_torch
