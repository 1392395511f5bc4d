#include "quire_torch/ops/grouped_linear.h"

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
          .w_buffers = a.w_buffers,
          .w_fingerprint = a.w_fingerprint,
          .fwd_scale = a.fwd_scale};
}

/// Whether backward multiplies codes that forward makes; else x and w themselves.
bool from_codes(const OptionalRecipeText& recipe) {
  return recipe->recipe && recipe->recipe->backward == Backward::quantized;
}

void check_forward(const GroupedLinear::Args& a, op::Needs need) {
  if (!a.recipe->recipe) {
    quire::check(a.w_buffers.empty(),
                 "grouped_linear: w is given quantized, and recipe '' multiplies w itself; "
                 "dequantize it, or give a recipe");
    return;
  }
  const quire::LinearSpec& recipe = *a.recipe->recipe;
  const bool known = recipe.backward == Backward::quantized || recipe.backward == Backward::high_precision;
  quire::check(known && !recipe.dx, "grouped_linear: recipe '", a.recipe.text(),
               "' asks for a backward= or dx= that groups do not have; leave it out, or use backward=high_precision");
  quire::check(recipe.backward == Backward::quantized || a.w_buffers.empty() || a.w_fingerprint || !need[kX],
               "grouped_linear: w is given quantized, and backward=high_precision multiplies w itself; pass it plain");
  if (from_codes(a.recipe) && recipe.dy.stochastic && (need[kX] || need[kW]) && !a.sr_state)
    quire::fail("grouped_linear: dy rounds stochastically under '", recipe.dy.to_string(),
                "' and needs sr_state, an int64 [2] tensor {seed, counter}; got none. quire.GroupedLinear has one");
}

RecipeText recipe_of(const GroupedLinear::Saved& s) { return RecipeText::parse(s.recipe.text()); }

op::Tensors<3> quantized_backward(const GroupedLinear::Saved& s, const at::Tensor& dy, op::Needs need) {
  const RecipeText recipe = recipe_of(s);
  const bool quantizes = need[kX] || need[kW];
  const bool stochastic = recipe->dy.stochastic && s.sr_state.tensor.defined();
  const auto scale = quantizes && s.bwd_scale.defined() ? std::optional(s.bwd_scale) : std::nullopt;
  auto g = op::call<GroupedLinearBwd>(
      {.dy = dy,
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
       .needs = (need[kX] ? kNeedsX : 0) | (need[kW] ? kNeedsW : 0) | (need[kBias] ? kNeedsBias : 0),
       .sr_state = stochastic ? std::optional(s.sr_state.tensor) : std::nullopt,
       .bwd_scale = scale});
  if (stochastic) op::call<SrAdvance>({.sr_state = {s.sr_state.tensor}});
  if (scale && s.bwd_amax.tensor.defined()) op::call<AmaxMax>({{s.bwd_amax.tensor}, g[5], 0});
  return {g[0], g[1], g[2]};
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
  op::OptionalTensorList given = keep_w && !plain ? a.w_buffers : op::OptionalTensorList();
  for (size_t i = 0; i < given.size(); ++i) {
    if (i % 6 < 3) given[i].reset();
    quire::check(i % 6 != 3 || given[i], "grouped_linear: w of group ", i / 6, " is given without columnwise_data, ",
                 "which the gradient of x needs; quantize it in both directions");
  }
  return {{r[0], r[3], r[6]},
          {.offsets = a.offsets,
           .x_data = plain ? a.x : r[1],
           .x_scale = r[2],
           .x_amax = r[3],
           .w_data = r[4],
           .w_scale = r[5],
           .w_amax = r[6],
           .bwd_scale = a.bwd_scale ? a.bwd_scale->clone() : at::Tensor(),
           .w = plain ? a.w.tensors : op::TensorList(),
           .w_buffers = std::move(given),
           .sr_state = {a.sr_state.value_or(at::Tensor())},
           .bwd_amax = {a.bwd_amax.value_or(at::Tensor())},
           .in_features = a.x.sym_size(-1),
           .recipe = a.recipe,
           .dtype = a.dtype,
           .stacked_w = is_stacked(a.w, 2),
           .stacked_bias = is_stacked(a.bias, 1)}};
}

op::Tensors<9> GroupedLinear::backward(const Saved& s, const op::Tensors<3>& grads, op::Needs need) {
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
  if (need[kW] && s.stacked_w) g[1] = g[1].unsqueeze(0);
  if (need[kBias] && s.stacked_bias) g[2] = g[2].unsqueeze(0);
  return {g[0], g[1], g[2], {}, {}, {}, {}, {}, {}};
}

}  // namespace quire_torch
