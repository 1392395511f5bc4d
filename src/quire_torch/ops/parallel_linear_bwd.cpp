// What the backward pass of parallel_linear computes: collectives beside the products.
#include <ATen/ops/cat.h>

#include "quire_torch/ops/linear_grads.h"
#include "quire_torch/ops/parallel_linear.h"
#include "quire_torch/ops/reduce.h"

namespace quire_torch {

using quire::Direction;

namespace {

/// The sum of dy over rows, in dy's dtype. own: dy of this rank alone, whose sums are added.
at::Tensor bias_gradient(const LinearBwd::Args& a, const at::Tensor& dy, bool own, const Parallel& p) {
  LinearBwd::Args of_bias = a;
  of_bias.dy = p.own_gradients ? a.dy : dy;
  of_bias.needs = kNeedsBias;
  const at::Tensor dbias = op::call<LinearBwd>(of_bias)[2];
  return own && !p.own_gradients ? sum(dbias, p.group) : dbias;
}

/// dx of the rows of dy.
at::Tensor dgrad(const LinearBwd::Args& a, const DirectionBuffers& rows, std::vector<c10::SymInt> shape,
                 at::ScalarType dtype) {
  return op::call<LinearDgrad>({.dy_data = rows[0],
                                .dy_scale = rows[1],
                                .dy_amax = rows[2],
                                .w_buffers = a.w_buffers,
                                .shape = std::move(shape),
                                .out_features = a.dy.sym_size(-1),
                                .recipe = a.recipe,
                                .dtype = dtype})[0];
}

/// Starts the sum of dx over the group, of rows of dy: where these are parts of a ring, in pieces.
Sums scattered_dgrad(const LinearBwd::Args& a, const Parallel& p, const DirectionBuffers& rows) {
  Sums sums;
  const at::ScalarType dtype = partial_dtype(p, a.dtype);
  const c10::SymInt own = rows_of(a.dy) / p.group.size;
  if (!p.ring || !gathers_codes(a.recipe->dy, Direction::rowwise, own)) {
    sums.started = {start_sum(dgrad(a, rows, sizes_with(a.dy, 1, a.in_features), dtype), p)};
    return sums;
  }
  const int64_t block = rows_of_block(a.recipe->dy, Direction::rowwise);
  for (int64_t i = 0; i < p.group.size; ++i) {
    const Cut piece = cut(i, own, block, p.group);
    const DirectionBuffers dy = rows_of(rows, a.recipe->dy, piece, p.group);
    sums.start(dgrad(a, dy, {piece.length * p.group.size, a.in_features}, dtype), p, piece);
  }
  return sums;
}

/// dx of each rank's rows of dy as they arrive.
at::Tensor dgrad_of_arrivals(const LinearBwd::Args& a, const Arrivals& dy) {
  op::TensorList dx;
  for (int64_t i = 0; i < dy.count(); ++i)
    dx.push_back(dgrad(a, dy.take(i), sizes_with(a.dy, 1, a.in_features), a.dtype));
  return at::cat(dx, 0);
}

}  // namespace

ParallelGradients parallel_bwd(const LinearBwd::Args& a, const Parallel& p, const op::OptionalTensor& part) {
  if (a.offsets) return parallel_groups_bwd(a, p, part);
  const quire::LinearSpec& recipe = *a.recipe;
  const bool rowwise = (a.needs & kNeedsX) != 0, columnwise = (a.needs & (kNeedsW | kKeepsDy)) != 0;
  const c10::SymInt own = rows_of(a.dy), n = a.dy.sym_size(-1);
  const bool codes = p.gathers_dy() && (!rowwise || gathers_codes(recipe.dy, Direction::rowwise, own)) &&
                     (!columnwise || gathers_codes(recipe.dy, Direction::columnwise, own));
  const at::Tensor dy = p.gathers_dy() && !codes ? gather(a.dy, p.group) : a.dy;
  const int axis = p.gathers_dy() && !codes ? -1 : p.axis_of_dy();
  const int64_t times = codes ? p.group.size : 1;
  ParallelGradients found;
  auto& out = found.values;
  for (at::Tensor& t : out) t = dy.new_empty({0});
  if (rowwise || columnwise) {
    const auto q = quantize_parts({{.t = dy,
                                    .spec = recipe.dy,
                                    .rowwise = rowwise,
                                    .columnwise = columnwise,
                                    .axis = axis,
                                    .scale = slot(a.bwd_scale, 0),
                                    .sr_state = a.sr_state,
                                    .part = part}},
                                  p.group)[0];
    DirectionBuffers rows{q[0], q[1], q[2]}, columns{q[3], q[4], q[5]};
    // Before a sum is under way: gloo is to have one collective at a time (collectives.h).
    if (a.bwd_scale) {
      out[5] = reduced(rowwise ? q[2] : q[5], axis, p.group);
      if (axis >= 0) rows[1] = scale_of_whole(rows[1], out[5], recipe.dy);
      if (axis >= 0) columns[1] = scale_of_whole(columns[1], out[5], recipe.dy);
    }
    if (codes && rowwise && p.ring)
      out[0] = dgrad_of_arrivals(a, Arrivals(rows, recipe.dy, p.group, false));
    else if (codes && rowwise)
      rows = gather(rows, recipe.dy, Direction::rowwise, p.group, false);
    if (codes && columnwise) columns = gather(columns, recipe.dy, Direction::columnwise, p.group, false);
    if (rowwise && p.column)
      found.dx = scattered_dgrad(a, p, rows);
    else if (rowwise && !(codes && p.ring))
      out[0] = dgrad(a, rows, sizes_with(dy, times, a.in_features), a.dtype);
    if (a.needs & kNeedsW)
      out[1] = op::call<LinearWgrad>({.dy_data = columns[0],
                                      .dy_scale = columns[1],
                                      .dy_amax = columns[2],
                                      .x_data = a.x_data,
                                      .x_scale = a.x_scale,
                                      .x_amax = a.x_amax,
                                      .tokens = rows_of(dy) * times,
                                      .out_features = n,
                                      .in_features = a.in_features,
                                      .recipe = a.recipe,
                                      .dtype = a.dtype})[0];
    if (a.needs & kKeepsDy) out[3] = columns[0], out[4] = columns[1];
    if ((a.needs & kKeepsDy) && !a.bwd_scale) out[5] = columns[2];
  }
  if (a.needs & kNeedsBias) out[2] = bias_gradient(a, dy, codes, p);
  return found;
}

std::vector<c10::SymInt> sizes_of_dx(const at::Tensor& dy, const Parallel& p, const c10::SymInt& in_features) {
  auto sizes = dy.sym_sizes().vec();
  if (p.column && p.sequence) sizes.front() = sizes.front() / p.group.size;
  sizes.back() = in_features;
  return sizes;
}

op::Tensors<3> parallel_unquantized_bwd(LinearUnquantizedBwd::Args a, const Parallel& p) {
  if (!p.column) return op::call<LinearUnquantizedBwd>(a);
  // dx first and apart, so that its sum runs beside the rest.
  const int64_t needs = a.needs;
  const at::Tensor dy = a.dy;
  Sums dx;
  a.needs = needs & kNeedsX;
  if (a.needs && !p.ring) dx.started = {start_sum(op::call<LinearUnquantizedBwd>(a)[0], p)};
  for (int64_t i = 0; a.needs && p.ring && i < p.group.size; ++i) {
    const Cut piece = cut(i, rows_of(dy) / p.group.size, 1, p.group);
    a.dy = rows_of(dy, piece, p.group);
    dx.start(op::call<LinearUnquantizedBwd>(a)[0], p, piece);
  }
  a.dy = dy;
  a.needs = needs & ~kNeedsX;
  const op::Tensors<3> rest = op::call<LinearUnquantizedBwd>(a);
  return {needs & kNeedsX ? dx.wait(p, sizes_of_dx(dy, p, a.in_features), a.dtype) : rest[0], rest[1], rest[2]};
}

at::Tensor dx_of_arrivals(LinearUnquantizedBwd::Args a, const Parallel& p, at::Tensor& dy) {
  const Arrivals arrivals(dy, p.group);
  a.needs = kNeedsX;
  op::TensorList whole, dx;
  for (int64_t i = 0; i < arrivals.count(); ++i) {
    whole.push_back(a.dy = arrivals.take(i)[0]);
    dx.push_back(op::call<LinearUnquantizedBwd>(a)[0]);
  }
  dy = at::cat(whole, 0);
  return at::cat(dx, 0);
}

}  // namespace quire_torch
