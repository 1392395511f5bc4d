// What the backward pass of linears computes, and where each gradient goes.
#include <ATen/ops/zeros.h>

#include "quire_torch/ops/destinations.h"
#include "quire_torch/ops/grouped_linear.h"
#include "quire_torch/ops/grouped_quantize.h"
#include "quire_torch/ops/parallel_linear.h"
#include "quire_torch/ops/reduce.h"
#include "quire_torch/ops/state.h"
#include "quire_torch/ops/wgrad.h"

namespace quire_torch {
namespace {

using quire::Backward, quire::Direction;

/// Again when backward begins: what it writes may have been resized since.
void check_backward(const GroupedLinear::Saved& s, const at::Tensor& dy) {
  const auto given = [](const at::Tensor& t) { return t.defined() ? op::OptionalTensor(t) : std::nullopt; };
  Destinations{given(s.sr_state.tensor), std::nullopt, given(s.bwd_amax.tensor), given(s.wgrad_stash.tensor),
               s.main_grad.tensors}
      .check(dy.device(), groups_of(s.offsets), {dy.sym_size(-1), s.in_features});
  const at::Tensor& memory = s.dgrad_out.tensor;
  auto wanted = dy.sym_sizes().vec();
  wanted.back() = s.in_features;
  quire::check(!memory.defined() || (memory.is_contiguous() && memory.scalar_type() == s.dtype &&
                                     memory.sym_numel() == c10::multiply_integers(wanted)),
               "linear: dgrad_out was changed since the forward pass and is no memory for ",
               c10::SymIntArrayRef(wanted), " any more");
}

RecipeText recipe_of(const GroupedLinear::Saved& s) { return RecipeText::parse(s.recipe.text()); }

bool external_wgrad(const GroupedLinear::Saved& s) {
  return !s.main_grad.tensors.empty() || s.wgrad_stash.tensor.defined();
}

/// The process group's part in it; null for a layer of one process.
const Parallel* parallel_of(const GroupedLinear::Saved& s) { return s.parallel->has_value() ? &**s.parallel : nullptr; }

/// Rows of dy, of all ranks where each has some.
c10::SymInt tokens_of(const GroupedLinear::Saved& s, const at::Tensor& dy) {
  const Parallel* p = parallel_of(s);
  return p && p->gathers_dy() ? rows_of(dy) * p->group.size : rows_of(dy);
}

/// Keeps operands of the gradient of w, and offsets behind them if there are any.
void keep_for_later(const GroupedLinear::Saved& s, op::TensorList operands, c10::SymInt tokens) {
  if (s.offsets) operands.push_back(*s.offsets);
  keep_operands({{s.wgrad_stash.tensor}, std::move(operands), std::move(tokens), s.recipe, s.overwrite_main_grad});
}

/// The gradient of w elsewhere than in linear_bwd, of the columnwise dy which that returned.
void weight_gradient(const GroupedLinear::Saved& s, const RecipeText& recipe, const DirectionBuffers& dy,
                     const DirectionBuffers& x, c10::SymInt tokens) {
  if (s.wgrad_stash.tensor.defined()) {
    keep_for_later(s, {dy[0], dy[1], dy[2], x[0], x[1], x[2]}, std::move(tokens));
  } else {
    call_into<Wgrad>(s.main_grad.tensors, dy[0], dy[1], dy[2], x[0], x[1], x[2], s.offsets, std::move(tokens), recipe,
                     s.overwrite_main_grad);
  }
}

/// What autograd is given for w when its gradient went elsewhere.
at::Tensor delivered(const GroupedLinear::Saved& s, const at::Tensor& dy) {
  if (!s.placeholder) return {};
  std::vector<c10::SymInt> sizes{dy.sym_size(-1), s.in_features};
  if (s.offsets) sizes.insert(sizes.begin(), groups_of(s.offsets));
  return at::zeros_symint(sizes, dy.options().dtype(s.dtype));
}

/// x itself, which forward kept; of all tokens where ranks have some each. after: what a graph is to wait for.
at::Tensor whole_x(const GroupedLinear::Saved& s, const at::Tensor& after) {
  const Parallel* p = parallel_of(s);
  return p && p->gathers_x() ? gather(tied(s.x_data, after), p->group) : s.x_data;
}

/// Codes of x that forward kept, likewise.
DirectionBuffers whole_codes(const GroupedLinear::Saved& s, Direction direction, const at::Tensor& after) {
  const DirectionBuffers own{s.x_data, s.x_scale, s.x_amax};
  const Parallel* p = parallel_of(s);
  if (!p || !p->gathers_x()) return own;
  const quire::QuantSpec& spec = (*s.recipe)->x;
  const bool given_scale = spec.given || s.bwd_scale.defined();
  return gather({tied(own[0], after), tied(own[1], after), own[2]}, spec, direction, p->group, given_scale);
}

/// x in the direction that backward reads, quantized now as it was in forward.
DirectionBuffers quantized_x(const GroupedLinear::Saved& s, bool columnwise, const at::Tensor& after) {
  const quire::QuantSpec& spec = (*s.recipe)->x;
  const Parallel* p = parallel_of(s);
  if (!p) return op::call<GroupedQuantize>({s.x_data, s.offsets, text_of(spec), columnwise});
  const auto q = quantize_parts({{.t = whole_x(s, after),
                                  .spec = spec,
                                  .rowwise = !columnwise,
                                  .columnwise = columnwise,
                                  .axis = p->gathers_x() ? -1 : p->axis_of_x(),
                                  .scale = spec.given ? std::optional(s.x_scale) : std::nullopt,
                                  .offsets = s.offsets}},
                                p->group)[0];
  const size_t first = columnwise ? 3 : 0;
  return {q[first], q[first + 1], q[first + 2]};
}

/// x columnwise, which forward kept, or x itself to be quantized now.
DirectionBuffers columnwise_x(const GroupedLinear::Saved& s, const at::Tensor& dy, bool needed) {
  if (needed && ((*s.recipe)->backward == Backward::requantized || s.x_plain)) return quantized_x(s, true, dy);
  if (needed && s.parallel->has_value()) return whole_codes(s, Direction::columnwise, dy);
  return {s.x_data, s.x_scale, s.x_amax};
}

at::Tensor decode(const GroupedLinear::Saved& s, const DirectionBuffers& q, const quire::QuantSpec& spec,
                  const at::Tensor& like) {
  auto shape = like.sym_sizes().vec();
  shape.back() = s.in_features;
  return op::call<GroupedDequantize>({.data = q[0],
                                      .scale = q[1],
                                      .amax = q[2],
                                      .offsets = s.offsets,
                                      .spec = text_of(spec),
                                      .shape = std::move(shape),
                                      .dtype = s.dtype})[0];
}

/// dx as its quantized values, where the recipe has a spec for it.
at::Tensor rounded_dx(const GroupedLinear::Saved& s, const quire::QuantSpec& spec, const at::Tensor& dx) {
  const c10::SymInt groups = groups_of(s.offsets);
  std::optional<at::Tensor> scale;
  if (s.bwd_scale.defined()) scale = s.bwd_scale.narrow_symint(0, groups, groups);
  if (const Parallel* p = parallel_of(s)) {
    const int axis = p->axis_of_x();
    const auto q =
        quantize_parts({{.t = dx, .spec = spec, .axis = axis, .scale = scale, .offsets = s.offsets}}, p->group)[0];
    if (scale && s.bwd_amax.tensor.defined())
      op::call<AmaxMax>({{s.bwd_amax.tensor}, reduced(q[2], axis, p->group), 1});
    return decode(s, {q[0], q[1], q[2]}, spec, dx);
  }
  const DirectionBuffers q = op::call<GroupedQuantize>(
      {.x = dx, .offsets = s.offsets, .spec = text_of(spec), .columnwise = false, .scale = scale});
  if (scale && s.bwd_amax.tensor.defined()) op::call<AmaxMax>({{s.bwd_amax.tensor}, q[2], 1});
  return decode(s, q, spec, dx);
}

op::Tensors<3> quantized_backward(const GroupedLinear::Saved& s, const at::Tensor& dy, op::Needs need) {
  const RecipeText recipe = recipe_of(s);
  const bool quantizes = need[kX] || need[kW];
  const bool stochastic = recipe->dy.stochastic && s.sr_state.tensor.defined();
  const bool external = need[kW] && external_wgrad(s);
  const auto scale = quantizes && s.bwd_scale.defined() ? std::optional(s.bwd_scale) : std::nullopt;
  const DirectionBuffers x = columnwise_x(s, dy, need[kW]);
  const LinearBwd::Args args{.dy = dy,
                             .offsets = s.offsets,
                             .x_data = x[0],
                             .x_scale = x[1],
                             .x_amax = x[2],
                             .w_buffers = s.w_buffers,
                             .in_features = s.in_features,
                             .recipe = recipe,
                             .dtype = s.dtype,
                             .needs = needed_gradients(need, external),
                             .sr_state = stochastic ? std::optional(s.sr_state.tensor) : std::nullopt,
                             .bwd_scale = scale};
  const Parallel* p = s.parallel->has_value() ? &**s.parallel : nullptr;
  auto [g, dx] = p ? parallel_bwd(args, *p, s.part) : ParallelGradients{op::call<LinearBwd>(args)};
  // First what may still refuse its operands, so that a refused call has changed nothing.
  if (external) weight_gradient(s, recipe, {g[3], g[4], g[5]}, x, tokens_of(s, dy));
  if (p && p->column && need[kX]) g[0] = dx.wait(*p, sizes_of_dx(dy, *p, s.in_features), s.dtype);
  if (stochastic) op::call<SrAdvance>({.sr_state = {s.sr_state.tensor}});
  if (scale && s.bwd_amax.tensor.defined()) op::call<AmaxMax>({{s.bwd_amax.tensor}, g[5], 0});
  if (need[kX] && recipe->dx) g[0] = rounded_dx(s, *recipe->dx, g[0]);
  return {g[0], external ? delivered(s, dy) : g[1], g[2]};
}

/// x as a backward pass multiplies it that does not multiply codes; dy: of as many tokens.
at::Tensor plain_x(const GroupedLinear::Saved& s, const at::Tensor& dy) {
  if (keeps_x(s.recipe)) return whole_x(s, dy);
  return decode(s, s.x_plain ? quantized_x(s, false, dy) : whole_codes(s, Direction::rowwise, dy), (*s.recipe)->x, dy);
}

/// Gradients as products of plain tensors (numerics.md 6.8).
op::Tensors<3> unquantized_backward(const GroupedLinear::Saved& s, const at::Tensor& own_dy, op::Needs need) {
  const Parallel* p = parallel_of(s);
  const bool external = need[kW] && external_wgrad(s), later = external && s.wgrad_stash.tensor.defined();
  const bool pieces = p && p->gathers_dy() && p->ring && need[kX];
  LinearUnquantizedBwd::Args args{.dy = own_dy,
                                  .offsets = s.offsets,
                                  .x = own_dy.new_empty({0}),
                                  .w = s.w,
                                  .w_buffers = s.w_buffers,
                                  .in_features = s.in_features,
                                  .recipe = s.recipe,
                                  .dtype = s.dtype,
                                  .needs = needed_gradients(need) & (later ? ~kNeedsW : ~int64_t{0})};
  const at::Tensor dx = pieces ? dx_of_arrivals(args, *p, args.dy) : at::Tensor();
  if (pieces)
    args.needs &= ~kNeedsX;
  else if (p && p->gathers_dy())
    args.dy = gather(own_dy, p->group);
  const at::Tensor dy = args.dy;
  if (need[kW]) args.x = plain_x(s, dy);
  op::Tensors<3> g = p ? parallel_unquantized_bwd(args, *p) : op::call<LinearUnquantizedBwd>(args);
  if (pieces) g[0] = dx;
  if (p && p->own_gradients && p->gathers_dy() && need[kBias]) {
    args.dy = own_dy;
    args.needs = kNeedsBias;
    g[2] = op::call<LinearUnquantizedBwd>(args)[2];
  }
  if (later) {
    keep_for_later(s, {dy.to(s.dtype), args.x.to(s.dtype)}, tokens_of(s, own_dy));
  } else if (external) {
    call_into<Accumulate>(s.main_grad.tensors, g[1], s.overwrite_main_grad);
  }
  if (external) g[1] = delivered(s, dy);
  return g;
}

}  // namespace

op::Tensors<3> GroupedLinear::gradients(const Saved& s, const at::Tensor& dy, op::Needs need) {
  check_backward(s, dy);
  op::Tensors<3> g =
      from_codes(mode_of(s.recipe)) ? quantized_backward(s, dy, need) : unquantized_backward(s, dy, need);
  if (need[kX] && s.dgrad_out.tensor.defined()) copy_result(s.dgrad_out.tensor, g[0], s.offsets);
  return g;
}

op::Tensors<11> GroupedLinear::backward(const Saved& s, const op::Tensors<3>& grads, op::Needs need) {
  op::Tensors<3> g = gradients(s, grads[0], need);
  // With ends of groups a gradient has a leading dimension of groups, which the only w of one group has not.
  const auto listed = [&](at::Tensor& gradient, bool stacked) {
    if (gradient.defined() && s.offsets && !stacked && gradient.sym_size(0) == 1) gradient = gradient.select(0, 0);
  };
  listed(g[1], s.stacked_w);
  if (need[kBias]) listed(g[2], s.stacked_bias);
  return {g[0], g[1], g[2], {}, {}, {}, {}, {}, {}, {}, {}};
}

}  // namespace quire_torch
