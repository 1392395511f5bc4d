// quire::norm, LayerNorm and RMSNorm of the last dimension, and quire::activation, an activation function. Their result
// may be quantized as it is computed: they then give y, the six buffers of a quantized tensor, or both.
#pragma once

#include <utility>

#include "quire/spec/pointwise_problem.h"
#include "quire_torch/op/autograd.h"
#include "quire_torch/ops/quantize.h"

namespace quire_torch {

/// What is wanted of a result. Without a spec, y; with one, its buffers, and y too if `keep`.
struct ProducedFields {
  at::ScalarType dtype;
  OptionalSpecText spec = OptionalSpecText::parse("");
  bool rowwise = false, columnwise = false, keep = false;
  std::optional<at::Tensor> scale{};  ///< float32 [1]: a static scale (numerics.md 1.5)

  bool quantized() const { return spec->has_value(); }
  bool has_y() const { return keep || !quantized(); }
};

inline constexpr std::array kProducedResults = before_buffers("y");

// Norms

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
  static std::array<op::Result<Int>, 9> results(const Args& a);
  static void run(const Args& a, op::Tensors<9>& out, const quire::Context& context);
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
  static std::array<op::Result<Int>, 3> results(const Args& a);
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

// Activations

/// x [*, H], or [*, 2H] for a gated activation (numerics.md 11.3) -> y [*, H] in `dtype`, or with a spec its buffers,
/// or both with `keep`. activation: text of quire::Activation, such as "swiglu". offsets [E]: rows belong to groups,
/// and buffers are the flat ones of groups (groups.h); scale is then float32 [E], and rows beyond the last group give
/// zero.
struct ActivationArgs {
  at::Tensor x;
  ActivationText activation;
  at::ScalarType dtype;
  OptionalSpecText spec = OptionalSpecText::parse("");
  bool rowwise = false, columnwise = false, keep = false;
  std::optional<at::Tensor> scale{}, offsets{};
  static constexpr auto kFields = std::tuple{op::field<&ActivationArgs::x>("x"),
                                             op::field<&ActivationArgs::activation>("activation"),
                                             op::field<&ActivationArgs::dtype>("dtype"),
                                             op::field<&ActivationArgs::spec>("spec", "\"\""),
                                             op::field<&ActivationArgs::rowwise>("rowwise", "False"),
                                             op::field<&ActivationArgs::columnwise>("columnwise", "False"),
                                             op::field<&ActivationArgs::keep>("keep_y", "False"),
                                             op::field<&ActivationArgs::scale>("scale", "None"),
                                             op::field<&ActivationArgs::offsets>("offsets", "None")};

  ProducedFields out() const { return {dtype, spec, rowwise, columnwise, keep, scale}; }

  /// Those of y.
  template <class Int>
  quire::Shape<Int> sizes() const;
};

/// The inner forward operator.
struct ActivationFwd : OpBase {
  static constexpr const char* kName = "activation_fwd";
  static constexpr const char* kNotDifferentiable = "is an inner operator without a gradient; call quire::activation";
  using Args = ActivationArgs;
  static constexpr auto kResults = kProducedResults;

  template <class Int>
  static std::array<op::Result<Int>, 7> results(const Args& a);
  static void run(const Args& a, op::Tensors<7>& out, const quire::Context& context);
};

/// dx like x. offsets: of the forward operator.
struct ActivationBwd : OpBase {
  static constexpr const char* kName = "activation_bwd";
  static constexpr auto kText = op::gradient_of("activation");
  static constexpr const char* kNotDifferentiable = kText.data();
  struct Args {
    at::Tensor dy, x;
    ActivationText activation;
    op::OptionalTensor offsets{};
    static constexpr auto kFields =
        std::tuple{op::field<&Args::dy>("dy"), op::field<&Args::x>("x"), op::field<&Args::activation>("activation"),
                   op::field<&Args::offsets>("offsets", "None")};
  };
  static constexpr std::array kResults{"dx"};

  template <class Int>
  static std::array<op::Result<Int>, 1> results(const Args& a);
  static void run(const Args& a, op::Tensors<1>& out, const quire::Context& context);
};

/// The differentiable operator. Where y is not wanted it is a carrier, with_carrier(). x is kept for backward.
struct Activation : OpBase {
  static constexpr const char* kName = "activation";
  using Args = ActivationArgs;
  static constexpr auto kResults = kProducedResults;
  static constexpr size_t kDifferentiable = 1;

  struct Saved {
    at::Tensor x;
    ActivationText activation;
    op::OptionalTensor offsets;
    static constexpr auto kFields = std::tuple{op::field<&Saved::x>("x"), op::field<&Saved::activation>("activation"),
                                               op::field<&Saved::offsets>("offsets")};
  };

  static op::Tensors<7> inference(const Args& a);
  static std::pair<op::Tensors<7>, Saved> forward(const Args& a, op::Needs need);
  static op::Tensors<3> backward(const Saved& s, const op::Tensors<7>& grads, op::Needs need);
};

}  // namespace quire_torch
