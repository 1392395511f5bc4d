// quire::route: which experts a token goes to, and with what weights (moe-reference.md 1).
#pragma once

#include <utility>

#include "quire/spec/routing.h"
#include "quire_torch/op/autograd.h"
#include "quire_torch/ops/quantize.h"

namespace quire_torch {

using RoutingText = Interned<quire::Routing>;

/// logits [*, E], expert_bias [E] or none -> topk_weights float32 [*, topk], topk_ids int32 [*, topk], best first.
/// routing: text of quire::Routing, such as "softmax:topk=2:renormalize". The bias acts on the choice alone.
struct RouteArgs {
  at::Tensor logits;
  op::OptionalTensor expert_bias;
  RoutingText routing;
  static constexpr auto kFields =
      std::tuple{op::field<&RouteArgs::logits>("logits"), op::field<&RouteArgs::expert_bias>("expert_bias"),
                 op::field<&RouteArgs::routing>("routing")};
};

/// The inner forward operator.
struct RouteFwd : OpBase {
  static constexpr const char* kName = "route_fwd";
  static constexpr const char* kNotDifferentiable = "is an inner operator without a gradient; call quire::route";
  using Args = RouteArgs;
  static constexpr std::array kResults{"topk_weights", "topk_ids"};

  template <class Int>
  static std::array<op::Result<Int>, 2> results(const Args& a);
  static void run(const Args& a, op::Tensors<2>& out, const quire::Context& context);
};

/// dlogits like logits, of topk_ids that route_fwd gave.
struct RouteBwd : OpBase {
  static constexpr const char* kName = "route_bwd";
  static constexpr auto kText = op::gradient_of("route");
  static constexpr const char* kNotDifferentiable = kText.data();
  struct Args {
    at::Tensor dweights, logits, topk_ids;
    RoutingText routing;
    static constexpr auto kFields =
        std::tuple{op::field<&Args::dweights>("dweights"), op::field<&Args::logits>("logits"),
                   op::field<&Args::topk_ids>("topk_ids"), op::field<&Args::routing>("routing")};
  };
  static constexpr std::array kResults{"dlogits"};

  template <class Int>
  static std::array<op::Result<Int>, 1> results(const Args& a);
  static void run(const Args& a, op::Tensors<1>& out, const quire::Context& context);
};

/// The differentiable operator: topk_weights have a gradient with respect to logits. Keeps logits and topk_ids.
struct Route : OpBase {
  static constexpr const char* kName = "route";
  using Args = RouteArgs;
  static constexpr auto kResults = RouteFwd::kResults;
  static constexpr size_t kDifferentiable = 1;

  struct Saved {
    at::Tensor logits, topk_ids;
    RoutingText routing;
    static constexpr auto kFields =
        std::tuple{op::field<&Saved::logits>("logits"), op::field<&Saved::topk_ids>("topk_ids"),
                   op::field<&Saved::routing>("routing")};
  };

  static op::Tensors<2> inference(const Args& a);
  static std::pair<op::Tensors<2>, Saved> forward(const Args& a, op::Needs need);
  static op::Tensors<2> backward(const Saved& s, const op::Tensors<2>& grads, op::Needs need);
};

/// topk_ids with -1 for the places whose expert `capacity` earlier places have: int32, any sizes.
struct LimitCapacity : OpBase {
  static constexpr const char* kName = "limit_capacity";
  static constexpr const char* kNotDifferentiable = "has no gradient; its result is an integer";
  struct Args {
    at::Tensor topk_ids;
    int64_t num_experts;
    c10::SymInt capacity;
    static constexpr auto kFields =
        std::tuple{op::field<&Args::topk_ids>("topk_ids"), op::field<&Args::num_experts>("num_experts"),
                   op::field<&Args::capacity>("capacity")};
  };
  static constexpr std::array kResults{"topk_ids"};

  template <class Int>
  static std::array<op::Result<Int>, 1> results(const Args& a);
  static void run(const Args& a, op::Tensors<1>& out, const quire::Context& context);
};

}  // namespace quire_torch
