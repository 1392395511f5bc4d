// Inference by runners: operators that name what computes them by a number, or by the name that it was registered
// under.
#pragma once

#include "quire/runner/registry.h"
#include "quire_torch/ops/route.h"
#include "quire_torch/ops/runner_name.h"

namespace quire_torch {

/// How a call names its runner: c10::SymInt, its handle (which may be an input of a graph, so that layers share one),
/// or RunnerNameText, an overload of the same operator that exported programs use.
template <class Which>
inline constexpr bool kByName = std::same_as<Which, RunnerNameText>;

inline constexpr const char* kInferenceOnly =
    "is for inference and has no gradient; detach its inputs, or call it within torch.no_grad()";

/// a == b for sizes. What tracing does not know it lets pass: the kernel asks again when the graph runs.
inline bool same_size(int64_t a, int64_t b) { return a == b; }
inline bool same_size(const c10::SymInt& a, const c10::SymInt& b) { return TORCH_GUARD_OR_TRUE(a.sym_eq(b)); }

/// Throws unless t is bfloat16 [*, K] and features, the size of a result, is positive. These are all the rules of a
/// trace: no kernel below asks the registry about a call that is only traced.
template <class Int>
op::Result<Int> runner_result(const at::Tensor& t, const c10::SymInt& features, const char* op, const char* argument) {
  quire::check(t.scalar_type() == at::kBFloat16 && t.dim() >= 1 && t.layout() == at::kStrided, op, ": ", argument,
               " must be dense bfloat16 with at least 1 dimension, got ", t.layout(), " ", t.scalar_type(), " with ",
               t.dim(), "; convert it with .to(torch.bfloat16)");
  quire::check(features.maybe_as_int().value_or(1) >= 1, op, ": the result must have at least 1 feature, got ",
               features);
  op::Result<Int> y{{}, at::kBFloat16};
  const auto sizes = op::sizes<Int>(t);
  y.sizes.append(sizes.begin(), sizes.end());
  y.sizes.back() = op::as<Int>(features);
  return y;
}

/// Throws unless `choices` is a dense [T, n] of that dtype, with the T of hidden_states [T, H], on its device.
template <class Int>
void check_choices(const at::Tensor& hidden_states, const at::Tensor& choices, at::ScalarType dtype, const char* what) {
  quire::check(hidden_states.dim() == 2, "nvfp4_moe: hidden_states must be [tokens, hidden_size], got ",
               hidden_states.dim(), " dimensions; use .flatten(0, -2)");
  quire::check(choices.dim() == 2 && choices.scalar_type() == dtype && choices.layout() == at::kStrided,
               "nvfp4_moe: ", what, " must be dense ", dtype, " with 2 dimensions, got ", choices.layout(), " ",
               choices.scalar_type(), " with ", choices.dim(), "; convert it with .to()");
  check_one_device(choices.device(), hidden_states.device(), "nvfp4_moe: ", what, " and hidden_states");
  quire::check(same_size(op::size<Int>(hidden_states, 0), op::size<Int>(choices, 0)), "nvfp4_moe: ", what,
               " must have a row per token; got ", op::size<Int>(choices, 0), " rows for ",
               op::size<Int>(hidden_states, 0), " tokens");
}

/// y [*, out_features] of x [*, K], both bfloat16. batch_invariant: as Context::batch_invariant.
template <class Which>
struct Nvfp4Linear : OpBase {
  static constexpr const char* kName = kByName<Which> ? "nvfp4_linear.by_name" : "nvfp4_linear";
  static constexpr const char* kNotDifferentiable = kInferenceOnly;
  struct Args {
    at::Tensor x;
    Which runner;
    c10::SymInt out_features;
    bool batch_invariant;
    static constexpr auto kFields = std::tuple{op::field<&Args::x>("x"), op::field<&Args::runner>("runner"),
                                               op::field<&Args::out_features>("out_features"),
                                               op::field<&Args::batch_invariant>("batch_invariant", "False")};
  };
  static constexpr std::array kResults{"y"};

  template <class Int>
  static std::array<op::Result<Int>, 1> results(const Args& a) {
    return {runner_result<Int>(a.x, a.out_features, "nvfp4_linear", "x")};
  }
  static void run(const Args& a, op::Tensors<1>& out, const quire::Context& context);
};

/// y [T, hidden_size] of hidden_states [T, H], both bfloat16, by experts topk_ids int32 [T, k] (-1: none), whose
/// results are weighted by topk_weights float32 [T, k].
template <class Which>
struct Nvfp4Moe : OpBase {
  static constexpr const char* kName = kByName<Which> ? "nvfp4_moe.by_name" : "nvfp4_moe";
  static constexpr const char* kNotDifferentiable = kInferenceOnly;
  struct Args {
    at::Tensor hidden_states, topk_weights, topk_ids;
    Which runner;
    c10::SymInt hidden_size;
    bool batch_invariant;
    static constexpr auto kFields = std::tuple{op::field<&Args::hidden_states>("hidden_states"),
                                               op::field<&Args::topk_weights>("topk_weights"),
                                               op::field<&Args::topk_ids>("topk_ids"),
                                               op::field<&Args::runner>("runner"),
                                               op::field<&Args::hidden_size>("hidden_size"),
                                               op::field<&Args::batch_invariant>("batch_invariant", "False")};
  };
  static constexpr std::array kResults{"y"};

  template <class Int>
  static std::array<op::Result<Int>, 1> results(const Args& a) {
    const auto y = runner_result<Int>(a.hidden_states, a.hidden_size, "nvfp4_moe", "hidden_states");
    check_choices<Int>(a.hidden_states, a.topk_weights, at::kFloat, "topk_weights");
    check_choices<Int>(a.hidden_states, a.topk_ids, at::kInt, "topk_ids");
    quire::check(same_size(op::size<Int>(a.topk_weights, 1), op::size<Int>(a.topk_ids, 1)),
                 "nvfp4_moe: topk_weights and topk_ids must have as many choices per token; got ",
                 op::size<Int>(a.topk_weights, 1), " and ", op::size<Int>(a.topk_ids, 1));
    return {y};
  }
  static void run(const Args& a, op::Tensors<1>& out, const quire::Context& context);
};

/// The same with experts and weights that quire::route chooses by router_logits [T, E] and expert_bias [E]
/// (moe-reference.md 1).
template <class Which>
struct Nvfp4MoeRouted : OpBase {
  static constexpr const char* kName = kByName<Which> ? "nvfp4_moe_routed.by_name" : "nvfp4_moe_routed";
  static constexpr const char* kNotDifferentiable = kInferenceOnly;
  struct Args {
    at::Tensor hidden_states, router_logits;
    op::OptionalTensor expert_bias;
    RoutingText routing;
    Which runner;
    c10::SymInt hidden_size;
    bool batch_invariant;
    static constexpr auto kFields = std::tuple{op::field<&Args::hidden_states>("hidden_states"),
                                               op::field<&Args::router_logits>("router_logits"),
                                               op::field<&Args::expert_bias>("expert_bias"),
                                               op::field<&Args::routing>("routing"),
                                               op::field<&Args::runner>("runner"),
                                               op::field<&Args::hidden_size>("hidden_size"),
                                               op::field<&Args::batch_invariant>("batch_invariant", "False")};

    RouteArgs route() const { return {router_logits, expert_bias, routing}; }
  };
  static constexpr std::array kResults{"y"};

  template <class Int>
  static std::array<op::Result<Int>, 1> results(const Args& a) {
    const auto y = runner_result<Int>(a.hidden_states, a.hidden_size, "nvfp4_moe", "hidden_states");
    check_choices<Int>(a.hidden_states, a.router_logits, a.router_logits.scalar_type(), "router_logits");
    RouteFwd::results<Int>(a.route());
    return {y};
  }
  static void run(const Args& a, op::Tensors<1>& out, const quire::Context& context);
};

}  // namespace quire_torch
