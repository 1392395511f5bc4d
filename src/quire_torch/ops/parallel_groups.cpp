#include "quire_torch/ops/parallel_groups.h"

#include <algorithm>

#include "quire_torch/ops/agree.h"
#include "quire_torch/ops/reduce.h"

namespace quire_torch {
namespace {

using quire::Backward;

/// The products of this rank, as backward is to know them.
GroupedLinear::Args own_product(const ParallelGroupedLinear::Args& a) {
  return {.x = a.x,
          .w = a.w,
          .bias = a.bias,
          .offsets = a.offsets,
          .recipe = a.recipe,
          .dtype = a.dtype,
          .w_buffers = a.w_buffers,
          .w_fingerprint = a.w_fingerprint,
          .sr_state = a.sr_state,
          .fwd_scale = a.fwd_scale,
          .bwd_scale = a.bwd_scale,
          .bwd_amax = a.bwd_amax,
          .wgrad_stash = a.wgrad_stash,
          .main_grad = a.main_grad,
          .overwrite_main_grad = a.overwrite_main_grad,
          .placeholder = a.placeholder};
}

void check(const ParallelGroupedLinear::Args& a, op::Needs need) {
  quire::check(a.parallel->has_value(), "parallel_grouped_linear: parallel must say how w is sharded, got ''; call ",
               "grouped_linear for weights that are not");
  const Parallel& p = **a.parallel;
  quire::check(!p.sequence, "parallel_grouped_linear: groups of tokens are the same on all ranks; got '", p.to_string(),
               "', leave 'sequence' out");
  check_input_scale(a.recipe, a.input_scale, a.fwd_scale, need[kW] && keeps_x(a.recipe), "parallel_grouped_linear");
  GroupedLinear::check(own_product(a), need);
}

/// Biases of a "row" layer on the first rank, and zeros on the others: their results are added.
op::GradientList once(const op::GradientList& biases, const at::Tensor& part) {
  op::GradientList own;
  for (const at::Tensor& bias : biases.tensors) own.tensors.push_back(bias.mul(part.narrow(0, 0, 1).eq(0)));
  return own;
}

/// The products, with operands quantized before that need amaxes of other ranks, or have a static scale.
GroupedLinear::Args operands(const ParallelGroupedLinear::Args& a, op::Needs need) {
  GroupedLinear::Args args = own_product(a);
  const Parallel& p = **a.parallel;
  if (!p.column) args.bias = once(a.bias, a.part);
  if (!a.recipe->has_value()) return args;
  if (!p.column) args.dtype = partial_dtype(p, a.dtype);
  if (a.fwd_scale) return args;
  const quire::LinearSpec& recipe = **a.recipe;
  const bool x_apart = a.input_scale || needs_reduction(recipe.x, p.axis_of_x()),
             w_apart = a.w_buffers.empty() && needs_reduction(recipe.w, p.axis_of_w());
  std::vector<Part> parts;
  if (x_apart)
    parts.push_back({.t = a.x,
                     .spec = recipe.x,
                     .columnwise = need[kW] && recipe.backward == Backward::quantized,
                     .axis = p.axis_of_x(),
                     .scale = a.input_scale,
                     .offsets = a.offsets});
  const auto groups = w_apart ? static_cast<size_t>(a.offsets.size(0)) : 0;
  for (size_t e = 0; e < groups; ++e)
    parts.push_back({.t = member(a.w.tensors, e, 2),
                     .spec = recipe.w,
                     .columnwise = need[kX] && from_codes(recipe.backward),
                     .axis = p.axis_of_w()});
  const auto q = quantize_parts(parts, p.group);
  for (size_t i = 0; i < q.size(); ++i) {
    auto& buffers = x_apart && i == 0 ? args.x_buffers : args.w_buffers;
    for (size_t k = 0; k < 6; ++k)
      buffers.push_back(k < 3 || parts[i].columnwise ? std::optional(q[i][k]) : std::nullopt);
  }
  return args;
}

}  // namespace

op::Tensors<3> ParallelGroupedLinear::inference(const Args& a) { return forward(a, {}).first; }

std::pair<op::Tensors<3>, ParallelGroupedLinear::Saved> ParallelGroupedLinear::forward(const Args& a, op::Needs need) {
  std::string layer = take_next_caller();
  check(a, need);
  const Caller caller(layer);
  const Parallel& p = **a.parallel;
  const Agreement agreement(layer, {.t = {a.x},
                                    .tokens = rows_of(a.x),
                                    .in_features = a.w.tensors.front().sym_size(-1),
                                    .out_features = a.w.tensors.front().sym_size(-2),
                                    .recipe = a.recipe,
                                    .parallel = a.parallel});
  const GroupedLinear::Args args = operands(a, need);
  const auto [r, x] = GroupedLinear::product(args, need);
  agree_before(r[0]);
  GroupedLinear::Args given = mode_of(a.recipe) == Backward::high_precision ? own_product(a) : args;
  given.dtype = a.dtype;
  given.bias = a.bias;
  Saved s = GroupedLinear::saved(given, x, r, need);
  s.parallel = a.parallel;
  s.part = a.part;
  s.layer = std::move(layer);
  op::Tensors<3> results{r[0], r[3], r[6]};
  if (!p.column) results[0] = wait_for_sum(start_sum(r[0], p), p, r[0].sym_sizes().vec(), a.dtype);
  if (a.fwd_scale) {
    results[1] = reduced(r[3], p.axis_of_x(), p.group);
    if (a.w_buffers.empty()) results[2] = reduced(r[6], p.axis_of_w(), p.group);
  }
  return {std::move(results), std::move(s)};
}

op::Tensors<12> ParallelGroupedLinear::backward(const Saved& s, const op::Tensors<3>& grads, op::Needs need) {
  const Caller caller(s.layer);
  op::Tensors<12> found;
  std::ranges::copy(GroupedLinear::backward(s, grads, need), found.begin());
  return found;
}

ParallelGradients parallel_groups_bwd(LinearBwd::Args a, const Parallel& p, const op::OptionalTensor& part) {
  // Of weights that are sharded by rows each rank has all of dy, and its part of dx.
  if (!p.column) return {op::call<LinearBwd>(a)};
  const int64_t needs = a.needs;
  const bool rowwise = (needs & kNeedsX) != 0, columnwise = (needs & (kNeedsW | kKeepsDy)) != 0;
  const Part dy{.t = a.dy,
                .spec = a.recipe->dy,
                .rowwise = rowwise,
                .columnwise = columnwise,
                .axis = p.axis_of_dy(),
                .offsets = a.offsets};
  const op::Tensors<2> amaxes = a.bwd_scale ? op::Tensors<2>() : reduced_amaxes(dy, p.group);
  const auto given = [&](size_t i) { return amaxes[i].defined() ? std::optional(amaxes[i]) : std::nullopt; };
  if (a.recipe->dy.stochastic) a.part = part;
  ParallelGradients found;
  for (at::Tensor& t : found.values) t = a.dy.new_empty({0});
  at::Tensor dy_amax;
  if (rowwise) {  // apart, so that its sum runs beside the rest
    LinearBwd::Args of_dx = a;
    of_dx.needs = kNeedsX;
    of_dx.given_amax = given(0);
    of_dx.dtype = partial_dtype(p, a.dtype);
    const auto r = op::call<LinearBwd>(of_dx);
    dy_amax = r[5];
    found.dx.started = {start_sum(r[0], p)};
  }
  a.needs = needs & ~kNeedsX;
  a.given_amax = given(1);
  if (a.needs) found.values = op::call<LinearBwd>(a);
  if (a.bwd_scale && (rowwise || columnwise))
    found.values[5] = reduced(rowwise ? dy_amax : found.values[5], p.axis_of_dy(), p.group);
  return found;
}

}  // namespace quire_torch
