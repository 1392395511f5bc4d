// quire::activation: an activation function, whose result may be quantized as it is computed.
#pragma once

#include <utility>

#include "quire_torch/op/autograd.h"
#include "quire_torch/ops/groups.h"
#include "quire_torch/ops/produced.h"

namespace quire_torch {

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

  template <class Int>
  quire::Shape<Int> sizes() const {
    auto s = shape<Int>(x);
    s.back() = s.back() / Int(activation->inputs());
    return s;
  }
};

/// The inner forward operator.
struct ActivationFwd : OpBase {
  static constexpr const char* kName = "activation_fwd";
  static constexpr const char* kNotDifferentiable = "is an inner operator without a gradient; call quire::activation";
  using Args = ActivationArgs;
  static constexpr auto kResults = kProducedResults;

  template <class Int>
  static std::array<op::Result<Int>, 7> results(const Args& a) {
    check_input(a.x, "activation: x");
    if (a.activation->row().gated)
      quire::check(op::size<Int>(a.x, -1) % Int(2) == Int(0), "activation: ", a.activation->row().name,
                   " is gated and takes two halves of x's last dimension, which is odd: ", op::size<Int>(a.x, -1));
    auto r = produced_results(a.out(), a.sizes<Int>(), "activation");
    if (a.offsets) give_group_sizes<Int>(a, r);
    return r;
  }
  static void run(const Args& a, op::Tensors<7>& out, const quire::Context& context);

 private:
  template <class Int>
  static void give_group_sizes(const Args& a, std::array<op::Result<Int>, 7>& r) {
    const int64_t groups = group_count(*a.offsets, a.x, "activation");
    const auto sizes = a.sizes<Int>();
    const quire::GroupSizes<Int> all{quire::product(sizes, 0, sizes.size() - 1), sizes.back(), groups};
    const quire::QuantSpec spec = a.spec->value_or(quire::QuantSpec{});
    const auto rows = grouped_results(spec, all, quire::Direction::rowwise, a.rowwise);
    const auto columns = grouped_results(spec, all, quire::Direction::columnwise, a.columnwise);
    std::copy(rows.begin(), rows.end(), r.begin() + 1);
    std::copy(columns.begin(), columns.end(), r.begin() + 4);
  }
};

/// dx like x.
struct ActivationBwd : OpBase {
  static constexpr const char* kName = "activation_bwd";
  static constexpr auto kText = op::gradient_of("activation");
  static constexpr const char* kNotDifferentiable = kText.data();
  struct Args {
    at::Tensor dy, x;
    ActivationText activation;
    static constexpr auto kFields =
        std::tuple{op::field<&Args::dy>("dy"), op::field<&Args::x>("x"), op::field<&Args::activation>("activation")};
  };
  static constexpr std::array kResults{"dx"};

  template <class Int>
  static std::array<op::Result<Int>, 1> results(const Args& a) {
    check_input(a.dy, "activation_bwd: dy");
    check_input(a.x, "activation_bwd: x");
    op::Result<Int> r{{}, a.x.scalar_type()};
    r.sizes.append(op::sizes<Int>(a.x).begin(), op::sizes<Int>(a.x).end());
    return {r};
  }
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
    static constexpr auto kFields = std::tuple{op::field<&Saved::x>("x"), op::field<&Saved::activation>("activation")};
  };

  static op::Tensors<7> inference(const Args& a);
  static std::pair<op::Tensors<7>, Saved> forward(const Args& a, op::Needs need);
  static op::Tensors<3> backward(const Saved& s, const op::Tensors<7>& grads, op::Needs need);
};

}  // namespace quire_torch
