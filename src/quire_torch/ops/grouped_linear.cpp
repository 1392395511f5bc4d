#include "quire_torch/ops/grouped_linear.h"

#include <ATen/ops/zeros.h>

#include "quire_torch/ops/state.h"

namespace quire_torch {
namespace {

using quire::Backward;

/// Positions of the tensor arguments of GroupedLinear, for op::Needs and for the order of gradients.
enum Input : size_t { kX, kW, kBias };

bool is_stacked(const op::GradientList& list, int64_t rank) {
  return list.tensors.size() == 1 && list.tensors[0].dim() > rank;
}

void check_lists(const GroupedLinear::Args& a) {
  quire::check(!a.w.tensors.empty() && a.w.tensors[0].dim() >= 2,
               "grouped_linear: w must be matrices [out_features, in_features], one for each group, or one "
               "[groups, out_features, in_features]; got ",
               a.w.tensors.size(), " tensors", a.w.tensors.empty() ? "" : " of fewer dimensions");
  quire::check(a.x.dim() == 0 || a.x.sym_size(-1) == a.w.tensors[0].sym_size(-1),
               "grouped_linear: x and w must agree on K; got x [..., ",
               a.x.dim() == 0 ? c10::SymInt(0) : a.x.sym_size(-1), "] and w ", a.w.tensors[0].sym_sizes());
}

GroupedLinearFwd::Args inner(const GroupedLinear::Args& a, int64_t save) {
  check_lists(a);
  return {.x = a.x,
          .w = a.w_buffers.empty() || a.w_fingerprint ? a.w.tensors : op::TensorList(),
          .bias = a.bias.tensors,
          .offsets = a.offsets,
          .out_features = a.w.tensors[0].sym_size(-2),
          .recipe = a.recipe,
          .dtype = a.dtype,
          .save = save,
          .x_buffers = a.x_buffers,
          .w_buffers = a.w_buffers,
          .w_fingerprint = a.w_fingerprint,
          .fwd_scale = a.fwd_scale};
}

/// Whether backward multiplies codes that forward makes; else x and w themselves.
bool from_codes(const OptionalRecipeText& recipe) {
  return recipe->recipe && recipe->recipe->backward == Backward::quantized;
}

using Three = std::array<at::Tensor, 3>;

/// The columnwise half of x's given buffers; an absent amax is `none`.
Three columnwise_of(const OptionalTensors& x_buffers, const at::Tensor& none) {
  quire::check(x_buffers.size() == 6 && x_buffers[3] && x_buffers[4], "grouped_linear: x is given without columnwise ",
               "buffers, which the gradient of w needs; quantize it in both directions");
  return {*x_buffers[3], *x_buffers[4], x_buffers[5].value_or(none)};
}

void check_forward(const GroupedLinear::Args& a, op::Needs need) {
  quire::check(from_codes(a.recipe) || (a.main_grad.empty() && !a.wgrad_stash),
               "grouped_linear: main_grad and wgrad_stash need a recipe whose backward multiplies codes, got '",
               a.recipe.text(), "'; leave them out");
  if (!a.recipe->recipe) {
    quire::check(a.w_buffers.empty() && a.x_buffers.empty(),
                 "grouped_linear: an operand is given quantized, and recipe '' multiplies x and w themselves; "
                 "dequantize it, or give a recipe");
    return;
  }
  const quire::LinearSpec& recipe = *a.recipe->recipe;
  const bool known = recipe.backward == Backward::quantized || recipe.backward == Backward::high_precision;
  quire::check(known && !recipe.dx, "grouped_linear: recipe '", a.recipe.text(),
               "' asks for a backward= or dx= that groups do not have; leave it out, or use backward=high_precision");
  quire::check(recipe.backward == Backward::quantized || a.w_buffers.empty() || a.w_fingerprint || !need[kX],
               "grouped_linear: w is given quantized, and backward=high_precision multiplies w itself; pass it plain");
  quire::check(recipe.backward == Backward::quantized || a.x_buffers.empty() || !need[kW],
               "grouped_linear: x is given quantized, and backward=high_precision multiplies x itself; pass it plain");
  if (from_codes(a.recipe) && recipe.dy.stochastic && (need[kX] || need[kW]) && !a.sr_state)
    quire::fail("grouped_linear: dy rounds stochastically under '", recipe.dy.to_string(),
                "' and needs sr_state, an int64 [2] tensor {seed, counter}; got none. quire.GroupedLinear has one");
}

RecipeText recipe_of(const GroupedLinear::Saved& s) { return RecipeText::parse(s.recipe.text()); }

/// The gradient of w elsewhere than in grouped_linear_bwd, of the columnwise dy which that returned.
void weight_gradient(const GroupedLinear::Saved& s, const RecipeText& recipe, const Three& dy) {
  if (s.wgrad_stash.tensor.defined()) {
    op::call<WgradStash>(
        {{s.wgrad_stash.tensor}, {dy[0], dy[1], dy[2], s.x_data, s.x_scale, s.x_amax, s.offsets}, 0, recipe});
  } else {
    op::call<GroupedWgrad>({.main_grad = {s.main_grad.tensors},
                            .dy_data = dy[0],
                            .dy_scale = dy[1],
                            .dy_amax = dy[2],
                            .x_data = s.x_data,
                            .x_scale = s.x_scale,
                            .x_amax = s.x_amax,
                            .offsets = s.offsets,
                            .recipe = recipe,
                            .overwrite = s.overwrite_main_grad});
  }
}

/// What autograd is given for w when its gradient went elsewhere.
at::Tensor delivered(const GroupedLinear::Saved& s, const at::Tensor& dy) {
  if (!s.placeholder) return {};
  return at::zeros_symint({s.offsets.sym_size(0), dy.sym_size(-1), s.in_features}, dy.options().dtype(s.dtype));
}

op::Tensors<3> quantized_backward(const GroupedLinear::Saved& s, const at::Tensor& dy, op::Needs need) {
  const RecipeText recipe = recipe_of(s);
  const bool quantizes = need[kX] || need[kW];
  const bool stochastic = recipe->dy.stochastic && s.sr_state.tensor.defined();
  const bool apart = need[kW] && (!s.main_grad.tensors.empty() || s.wgrad_stash.tensor.defined());
  const auto scale = quantizes && s.bwd_scale.defined() ? std::optional(s.bwd_scale) : std::nullopt;
  auto g =
      op::call<GroupedLinearBwd>({.dy = dy,
                                  .offsets = s.offsets,
                                  .x_data = s.x_data,
                                  .x_scale = s.x_scale,
                                  .x_amax = s.x_amax,
                                  .w_data = s.w_data,
                                  .w_scale = s.w_scale,
                                  .w_amax = s.w_amax,
                                  .w_buffers = s.w_buffers,
                                  .in_features = s.in_features,
                                  .recipe = recipe,
                                  .dtype = s.dtype,
                                  .needs = (need[kX] ? kNeedsX : 0) | (need[kW] ? (apart ? kKeepsDy : kNeedsW) : 0) |
                                           (need[kBias] ? kNeedsBias : 0),
                                  .sr_state = stochastic ? std::optional(s.sr_state.tensor) : std::nullopt,
                                  .bwd_scale = scale});
  if (stochastic) op::call<SrAdvance>({.sr_state = {s.sr_state.tensor}});
  if (scale && s.bwd_amax.tensor.defined()) op::call<AmaxMax>({{s.bwd_amax.tensor}, g[5], 0});
  if (apart) weight_gradient(s, recipe, {g[3], g[4], g[5]});
  return {g[0], apart ? delivered(s, dy) : g[1], g[2]};
}

}  // namespace

op::Tensors<3> GroupedLinear::inference(const Args& a) {
  check_forward(a, {});
  const auto r = op::call<GroupedLinearFwd>(inner(a, 0));
  return {r[0], r[3], r[6]};
}

std::pair<op::Tensors<3>, GroupedLinear::Saved> GroupedLinear::forward(const Args& a, op::Needs need) {
  check_forward(a, need);
  // Each operand is kept for the gradient of the other one.
  const bool plain = !from_codes(a.recipe), keep_x = need[kW], keep_w = need[kX];
  const auto r = op::call<GroupedLinearFwd>(inner(a, plain ? 0 : (keep_x ? kSaveX : 0) | (keep_w ? kSaveW : 0)));
  const auto x = keep_x && !plain && !a.x_buffers.empty() ? columnwise_of(a.x_buffers, r[3]) : Three{r[1], r[2], r[3]};
  op::OptionalTensorList given = keep_w && !plain ? a.w_buffers : op::OptionalTensorList();
  for (size_t i = 0; i < given.size(); ++i) {
    if (i % 6 < 3) given[i].reset();
    quire::check(i % 6 != 3 || given[i], "grouped_linear: w of group ", i / 6, " is given without columnwise_data, ",
                 "which the gradient of x needs; quantize it in both directions");
  }
  return {{r[0], r[3], r[6]},
          {.offsets = a.offsets,
           .x_data = plain ? a.x : x[0],
           .x_scale = x[1],
           .x_amax = x[2],
           .w_data = r[4],
           .w_scale = r[5],
           .w_amax = r[6],
           .bwd_scale = a.bwd_scale ? a.bwd_scale->clone() : at::Tensor(),
           .w = plain ? a.w.tensors : op::TensorList(),
           .w_buffers = std::move(given),
           .sr_state = {a.sr_state.value_or(at::Tensor())},
           .bwd_amax = {a.bwd_amax.value_or(at::Tensor())},
           .wgrad_stash = {a.wgrad_stash.value_or(at::Tensor())},
           .main_grad = {a.main_grad},
           .in_features = a.x.sym_size(-1),
           .recipe = a.recipe,
           .dtype = a.dtype,
           .stacked_w = is_stacked(a.w, 2),
           .stacked_bias = is_stacked(a.bias, 1),
           .overwrite_main_grad = a.overwrite_main_grad,
           .placeholder = a.placeholder}};
}

op::Tensors<10> GroupedLinear::backward(const Saved& s, const op::Tensors<3>& grads, op::Needs need) {
  op::Tensors<3> g;
  if (from_codes(s.recipe)) {
    g = quantized_backward(s, grads[0], need);
  } else {
    g = op::call<GroupedPlainBwd>(
        {.dy = grads[0],
         .offsets = s.offsets,
         .x = s.x_data,
         .w = s.w,
         .dtype = s.dtype,
         .needs = (need[kX] ? kNeedsX : 0) | (need[kW] ? kNeedsW : 0) | (need[kBias] ? kNeedsBias : 0)});
  }
  // A list that is one tensor for all groups has a gradient of one entry.
  if (need[kW] && g[1].defined() && s.stacked_w) g[1] = g[1].unsqueeze(0);
  if (need[kBias] && s.stacked_bias) g[2] = g[2].unsqueeze(0);
  return {g[0], g[1], g[2], {}, {}, {}, {}, {}, {}, {}};
}

}  // namespace quire_torch
