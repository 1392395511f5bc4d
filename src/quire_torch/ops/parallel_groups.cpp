#include "quire_torch/ops/parallel_groups.h"

#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include "quire_torch/ops/agree.h"
#include "quire_torch/ops/grouped_linear_bwd.h"
#include "quire_torch/ops/reduce.h"

namespace quire_torch {
namespace {

using quire::Backward;

/// The products of this rank, as backward is to know them.
GroupedLinear::Args own_product(const ParallelGroupedLinear::Args& call) {
  GroupedLinear::Args product = as_given(call);
  product.w = call.w;
  product.bias = call.bias;
  product.offsets = call.offsets;
  return product;
}

void check(const ParallelGroupedLinear::Args& call, op::Needs need) {
  quire::check(call.parallel->has_value(), "parallel_grouped_linear: parallel must say how w is sharded, got ''; call ",
               "grouped_linear for weights that are not");
  const Parallel& sharding = **call.parallel;
  quire::check(!sharding.sequence, "parallel_grouped_linear: groups of tokens are the same on all ranks; got '",
               sharding.to_string(), "', leave 'sequence' out");
  check_input_scale(call.recipe, call.input_scale, call.fwd_scale, need[kW] && keeps_x(call.recipe),
                    "parallel_grouped_linear");
  GroupedLinear::check(own_product(call), need);
}

/// Biases on the first rank, and zeros on the others, whose results are added to its. Not by a product, in which an
/// infinite bias would give NaN.
op::GradientList once(const op::GradientList& biases, const at::Tensor& part) {
  op::GradientList own;
  const at::Tensor first = part.narrow(0, 0, 1).eq(0);
  for (const at::Tensor& bias : biases.tensors) own.tensors.push_back(at::where(first, bias, at::zeros_like(bias)));
  return own;
}

/// Six buffers, of which there are the columnwise ones where the part has some.
void append(OptionalTensors& buffers, const Part& part, const op::Tensors<6>& codes) {
  for (size_t i = 0; i < codes.size(); ++i)
    buffers.push_back(i < 3 || part.columnwise ? std::optional(codes[i]) : std::nullopt);
}

/// The products, with operands quantized before that need amaxes of other ranks, or have a static scale.
GroupedLinear::Args operands(const ParallelGroupedLinear::Args& call, op::Needs need) {
  GroupedLinear::Args product = own_product(call);
  const Parallel& sharding = **call.parallel;
  if (sharding.sums_y()) product.bias = once(call.bias, call.part);
  if (!call.recipe->has_value()) return product;
  if (sharding.sums_y()) product.dtype = partial_dtype(sharding, call.dtype);
  if (call.fwd_scale) return product;
  const quire::LinearSpec& recipe = **call.recipe;
  const bool quantizes_x = call.input_scale || needs_reduction(recipe.x, sharding.axis_of_x()),
             quantizes_w = call.w_buffers.empty() && needs_reduction(recipe.w, sharding.axis_of_w());
  std::vector<Part> parts;
  if (quantizes_x)
    parts.push_back({.t = call.x,
                     .spec = recipe.x,
                     .role = "x",
                     .columnwise = need[kW] && recipe.backward == Backward::quantized,
                     .axis = sharding.axis_of_x(),
                     .scale = call.input_scale,
                     .offsets = call.offsets});
  const auto groups = quantizes_w ? static_cast<size_t>(call.offsets.size(0)) : 0;
  for (size_t e = 0; e < groups; ++e)
    parts.push_back({.t = member(call.w.tensors, e, 2),
                     .spec = recipe.w,
                     .role = "w",
                     .columnwise = need[kX] && from_codes(recipe.backward),
                     .axis = sharding.axis_of_w()});
  const std::vector<op::Tensors<6>> codes = quantize_parts(parts, sharding.group);
  for (size_t i = 0; i < codes.size(); ++i)
    append(quantizes_x && i == 0 ? product.x_buffers : product.w_buffers, parts[i], codes[i]);
  return product;
}

}  // namespace

op::Tensors<3> ParallelGroupedLinear::inference(const Args& a) { return forward(a, {}).first; }

std::pair<op::Tensors<3>, ParallelGroupedLinear::Saved> ParallelGroupedLinear::forward(const Args& call,
                                                                                       op::Needs need) {
  std::string layer = take_next_caller();
  check(call, need);
  const Caller caller(layer);
  const Parallel& sharding = **call.parallel;
  const Agreement agreement(layer, {.t = {call.x},
                                    .tokens = rows_of(call.x),
                                    .in_features = call.w.tensors.front().sym_size(-1),
                                    .out_features = call.w.tensors.front().sym_size(-2),
                                    .recipe = call.recipe,
                                    .parallel = call.parallel});
  const GroupedLinear::Args product = operands(call, need);
  const auto [results, x] = GroupedLinear::product(product, need);
  agree_before(results[0]);
  GroupedLinear::Args known = mode_of(call.recipe) == Backward::high_precision ? own_product(call) : product;
  known.dtype = call.dtype;
  known.bias = call.bias;
  Saved kept{GroupedLinear::saved(known, x, results, need), call.part, call.parallel, std::move(layer)};
  at::Tensor y = results[0], x_amax = results[3], w_amax = results[6];
  if (sharding.sums_y()) y = wait_for_sum(start_sum(y, sharding), sharding, results[0].sym_sizes().vec(), call.dtype);
  if (call.fwd_scale) {
    x_amax = reduced(x_amax, sharding.axis_of_x(), sharding.group);
    if (call.w_buffers.empty()) w_amax = reduced(w_amax, sharding.axis_of_w(), sharding.group);
  }
  return {{y, x_amax, w_amax}, std::move(kept)};
}

op::Tensors<12> ParallelGroupedLinear::backward(const Saved& s, const op::Tensors<3>& grads, op::Needs need) {
  const Caller caller(s.layer);
  auto [dx, dw, dbias] = as_lists(s, parallel_gradients(s, grads[0], need), need);
  return {std::move(dx), std::move(dw), std::move(dbias), {}, {}, {}, {}, {}, {}, {}, {}, {}};
}

ParallelGradients parallel_groups_bwd(LinearBwd::Args args, const Parallel& sharding, const op::OptionalTensor& part) {
  // Of weights that are sharded by inputs each rank has all of dy, and its part of dx.
  const c10::SymInt tokens = rows_of(args.dy);
  if (!sharding.sums_dx()) return {.values = op::call<LinearBwd>(args), .tokens = tokens};
  const int64_t needs = args.needs;
  const bool rowwise = (needs & kNeedsX) != 0, columnwise = (needs & (kNeedsW | kKeepsDy)) != 0;
  const Part dy{.t = args.dy,
                .spec = args.recipe->dy,
                .rowwise = rowwise,
                .columnwise = columnwise,
                .axis = sharding.axis_of_dy(),
                .offsets = args.offsets};
  const op::Tensors<2> amaxes = args.bwd_scale ? op::Tensors<2>() : reduced_amaxes(dy, sharding.group);
  const auto given = [&](size_t i) { return amaxes[i].defined() ? std::optional(amaxes[i]) : std::nullopt; };
  if (args.recipe->dy.stochastic) args.part = part;
  ParallelGradients found{.values = {}, .tokens = tokens};
  for (at::Tensor& t : found.values) t = args.dy.new_empty({0});
  at::Tensor dy_amax;
  if (rowwise) {  // apart, so that its sum runs beside the rest
    LinearBwd::Args of_dx = args;
    of_dx.needs = kNeedsX;
    of_dx.given_amax = given(0);
    of_dx.dtype = partial_dtype(sharding, args.dtype);
    const op::Tensors<6> rows = op::call<LinearBwd>(of_dx);
    dy_amax = rows[5];
    found.dx.started = {start_sum(rows[0], sharding)};
  }
  args.needs = needs & ~kNeedsX;
  args.given_amax = given(1);
  if (args.needs) found.values = op::call<LinearBwd>(args);
  if (args.bwd_scale && (rowwise || columnwise))
    found.values[5] = reduced(rowwise ? dy_amax : found.values[5], sharding.axis_of_dy(), sharding.group);
  return found;
}

}  // namespace quire_torch
