#include "quire_torch/ops/linear.h"

namespace quire_torch {
namespace {

/// Positions of the tensor arguments of Linear, for op::Needs and for the order of gradients.
enum Input : size_t { kX, kW, kBias };

}  // namespace

std::pair<op::Tensors<1>, Linear::Saved> Linear::forward(const Args& a, op::Needs need) {
  // Each operand is kept for the gradient of the other one.
  const int64_t save = (need[kW] ? kSaveX : 0) | (need[kX] ? kSaveW : 0);
  if (a.recipe->dy.stochastic && save)
    quire::check(a.sr_state.has_value(), "linear: dy rounds stochastically under '", a.recipe->dy.to_string(),
                 "' and needs sr_state, an int64 [2] tensor {seed, counter}; got none. quire.Linear has one");
  auto r = op::call<LinearFwd>(inner(a, save));
  return {{r[0]},
          {.x_data = r[3],
           .x_scale = r[4],
           .x_amax = r[5],
           .w_data = r[6],
           .w_scale = r[7],
           .w_amax = r[8],
           .sr_state = {a.sr_state.value_or(at::Tensor())},
           .in_features = a.w.sym_size(1),
           .recipe = a.recipe,
           .dtype = a.dtype}};
}

op::Tensors<4> Linear::backward(const Saved& s, const op::Tensors<1>& dy, op::Needs need) {
  const bool stochastic = s.recipe->dy.stochastic && s.sr_state.tensor.defined();
  const int64_t needs = (need[kX] ? kNeedsX : 0) | (need[kW] ? kNeedsW : 0) | (need[kBias] ? kNeedsBias : 0);
  auto g = op::call<LinearBwd>({.dy = dy[0],
                                .x_data = s.x_data,
                                .x_scale = s.x_scale,
                                .x_amax = s.x_amax,
                                .w_data = s.w_data,
                                .w_scale = s.w_scale,
                                .w_amax = s.w_amax,
                                .in_features = s.in_features,
                                .recipe = s.recipe,
                                .dtype = s.dtype,
                                .needs = needs,
                                .dy_buffers = {},
                                .sr_state = stochastic ? std::optional(s.sr_state.tensor) : std::nullopt});
  if (stochastic) op::call<SrAdvance>({.sr_state = {s.sr_state.tensor}});
  return {g[0], g[1], g[2], {}};
}

}  // namespace quire_torch
