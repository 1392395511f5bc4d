#include "quire_torch/ops/grouped_linear_bwd.h"

#include <ATen/ops/zeros.h>

#include <vector>

#include "quire_torch/ops/grouped_quantize.h"
#include "quire_torch/ops/state.h"
#include "quire_torch/ops/wgrad.h"

namespace quire_torch {

using quire::Backward;

LinearBwd::Args quantized_arguments(const GroupedLinear::Saved& s, const at::Tensor& dy, const DirectionBuffers& x,
                                    op::Needs need) {
  return {.dy = dy,
          .offsets = s.offsets,
          .x_data = x[0],
          .x_scale = x[1],
          .x_amax = x[2],
          .w_buffers = s.w_buffers,
          .in_features = s.in_features,
          .recipe = RecipeText::parse(s.recipe.text()),
          .dtype = s.dtype,
          .needs = needed_gradients(need, goes_elsewhere(s)),
          .sr_state = (*s.recipe)->dy.stochastic ? given(s.sr_state.tensor) : std::nullopt,
          .bwd_scale = need[kX] || need[kW] ? given(s.bwd_scale) : std::nullopt};
}

LinearUnquantizedBwd::Args unquantized_arguments(const GroupedLinear::Saved& s, const at::Tensor& dy, op::Needs need) {
  const bool later = s.wgrad_stash.tensor.defined();
  return {.dy = dy,
          .offsets = s.offsets,
          .x = dy.new_empty({0}),
          .w = s.w,
          .w_buffers = s.w_buffers,
          .in_features = s.in_features,
          .recipe = s.recipe,
          .dtype = s.dtype,
          .needs = needed_gradients(need) & (later ? ~kNeedsW : ~int64_t{0})};
}

at::Tensor decode(const GroupedLinear::Saved& s, const DirectionBuffers& codes, const quire::QuantSpec& spec,
                  const at::Tensor& like) {
  auto shape = like.sym_sizes().vec();
  shape.back() = s.in_features;
  return op::call<GroupedDequantize>({.data = codes[0],
                                      .scale = codes[1],
                                      .amax = codes[2],
                                      .offsets = s.offsets,
                                      .spec = text_of(spec),
                                      .shape = std::move(shape),
                                      .dtype = s.dtype})[0];
}

op::OptionalTensor scale_of_dx(const GroupedLinear::Saved& s) {
  const c10::SymInt groups = groups_of(s.offsets);
  return s.bwd_scale.defined() ? std::optional(s.bwd_scale.narrow_symint(0, groups, groups)) : std::nullopt;
}

op::Tensors<3> as_lists(const GroupedLinear::Saved& s, op::Tensors<3> gradients, op::Needs need) {
  const auto listed = [&](at::Tensor& gradient, bool stacked) {
    if (gradient.defined() && s.offsets && !stacked && gradient.sym_size(0) == 1) gradient = gradient.select(0, 0);
  };
  listed(gradients[1], s.stacked_w);
  if (need[kBias]) listed(gradients[2], s.stacked_bias);
  return gradients;
}

// Where gradients go besides autograd

namespace {

/// Throws unless the memory for dx, where a caller gave some, still fits it.
void check_dgrad_out(const GroupedLinear::Saved& s, const at::Tensor& dy) {
  const at::Tensor& memory = s.dgrad_out.tensor;
  auto wanted = dy.sym_sizes().vec();
  wanted.back() = s.in_features;
  quire::check(
      memory.is_contiguous() && memory.scalar_type() == s.dtype && memory.sym_numel() == c10::multiply_integers(wanted),
      "linear: dgrad_out was changed since the forward pass and is no memory for ", c10::SymIntArrayRef(wanted),
      " any more");
}

/// Keeps operands of the gradient of w, and offsets behind them if there are any.
void keep_for_later(const GroupedLinear::Saved& s, op::TensorList operands, c10::SymInt tokens) {
  if (s.offsets) operands.push_back(*s.offsets);
  keep_operands({{s.wgrad_stash.tensor}, std::move(operands), std::move(tokens), s.recipe, s.overwrite_main_grad});
}

/// What autograd is given for w when its gradient went elsewhere.
at::Tensor placeholder(const GroupedLinear::Saved& s, const at::Tensor& dy) {
  if (!s.placeholder) return {};
  std::vector<c10::SymInt> sizes{dy.sym_size(-1), s.in_features};
  if (s.offsets) sizes.insert(sizes.begin(), groups_of(s.offsets));
  return at::zeros_symint(sizes, dy.options().dtype(s.dtype));
}

}  // namespace

at::Tensor put_elsewhere(const GroupedLinear::Saved& s, const LinearBwd::Args& args, const op::Tensors<6>& found,
                         c10::SymInt tokens) {
  const auto& [dx, dw, dbias, dy_data, dy_scale, dy_amax] = found;
  if (s.wgrad_stash.tensor.defined())
    keep_for_later(s, {dy_data, dy_scale, dy_amax, args.x_data, args.x_scale, args.x_amax}, std::move(tokens));
  else
    call_into<Wgrad>(s.main_grad.tensors, dy_data, dy_scale, dy_amax, args.x_data, args.x_scale, args.x_amax, s.offsets,
                     std::move(tokens), args.recipe, s.overwrite_main_grad);
  return placeholder(s, args.dy);
}

at::Tensor put_elsewhere(const GroupedLinear::Saved& s, const LinearUnquantizedBwd::Args& args, const at::Tensor& dw) {
  if (s.wgrad_stash.tensor.defined())
    keep_for_later(s, {args.dy.to(s.dtype), args.x.to(s.dtype)}, rows_of(args.dy));
  else
    call_into<Accumulate>(s.main_grad.tensors, dw, s.overwrite_main_grad);
  return placeholder(s, args.dy);
}

// The whole

namespace {

/// Columnwise codes of x: forward kept them, or x itself, which is quantized now as it was then.
DirectionBuffers columnwise_x(const GroupedLinear::Saved& s, op::Needs need) {
  if (need[kW] && (*s.recipe)->backward == Backward::requantized)
    return op::call<GroupedQuantize>({s.x_data, s.offsets, text_of((*s.recipe)->x), /*columnwise=*/true});
  return {s.x_data, s.x_scale, s.x_amax};
}

/// dx as its quantized values, where the recipe has a spec for it.
at::Tensor rounded_dx(const GroupedLinear::Saved& s, const quire::QuantSpec& spec, const at::Tensor& dx) {
  const op::OptionalTensor scale = scale_of_dx(s);
  const DirectionBuffers codes = op::call<GroupedQuantize>(
      {.x = dx, .offsets = s.offsets, .spec = text_of(spec), .columnwise = false, .scale = scale});
  if (scale && s.bwd_amax.tensor.defined()) op::call<AmaxMax>({{s.bwd_amax.tensor}, codes[2], 1});
  return decode(s, codes, spec, dx);
}

op::Tensors<3> quantized_backward(const GroupedLinear::Saved& s, const at::Tensor& dy, op::Needs need) {
  const LinearBwd::Args args = quantized_arguments(s, dy, columnwise_x(s, need), need);
  op::Tensors<6> found = op::call<LinearBwd>(args);
  // First what may still refuse its operands, so that a refused call has changed nothing.
  if (need[kW] && goes_elsewhere(s)) found[1] = put_elsewhere(s, args, found, rows_of(dy));
  if (args.sr_state) op::call<SrAdvance>({.sr_state = {*args.sr_state}});
  if (args.bwd_scale && s.bwd_amax.tensor.defined()) op::call<AmaxMax>({{s.bwd_amax.tensor}, found[5], 0});
  if (need[kX] && args.recipe->dx) found[0] = rounded_dx(s, *args.recipe->dx, found[0]);
  return {found[0], found[1], found[2]};
}

/// Gradients as products of plain tensors (numerics.md 6.8).
op::Tensors<3> unquantized_backward(const GroupedLinear::Saved& s, const at::Tensor& dy, op::Needs need) {
  LinearUnquantizedBwd::Args args = unquantized_arguments(s, dy, need);
  if (need[kW]) args.x = keeps_x(s.recipe) ? s.x_data : decode(s, {s.x_data, s.x_scale, s.x_amax}, (*s.recipe)->x, dy);
  op::Tensors<3> found = op::call<LinearUnquantizedBwd>(args);
  if (need[kW] && goes_elsewhere(s)) found[1] = put_elsewhere(s, args, found[1]);
  return found;
}

}  // namespace

op::Tensors<3> GroupedLinear::gradients(const Saved& s, const at::Tensor& dy, op::Needs need) {
  Destinations::of(s).check(dy.device(), groups_of(s.offsets), {dy.sym_size(-1), s.in_features});
  if (s.dgrad_out.tensor.defined()) check_dgrad_out(s, dy);
  auto found = from_codes(mode_of(s.recipe)) ? quantized_backward(s, dy, need) : unquantized_backward(s, dy, need);
  if (need[kX] && s.dgrad_out.tensor.defined()) copy_result(s.dgrad_out.tensor, found[0], s.offsets);
  return found;
}

op::Tensors<11> GroupedLinear::backward(const Saved& s, const op::Tensors<3>& grads, op::Needs need) {
  auto [dx, dw, dbias] = as_lists(s, gradients(s, grads[0], need), need);
  return {std::move(dx), std::move(dw), std::move(dbias), {}, {}, {}, {}, {}, {}, {}, {}};
}

op::Tensors<4> Linear::backward(const Saved& s, const op::Tensors<1>& dy, op::Needs need) {
  auto [dx, dw, dbias] = GroupedLinear::gradients(s, dy[0], need);
  return {std::move(dx), std::move(dw), std::move(dbias), {}};
}
op::Tensors<5> LinearPrequantized::backward(const Saved& s, const op::Tensors<1>& dy, op::Needs need) {
  auto [dx, dw, dbias] = GroupedLinear::gradients(s, dy[0], need);
  return {std::move(dx), std::move(dw), std::move(dbias), {}, {}};
}

}  // namespace quire_torch
