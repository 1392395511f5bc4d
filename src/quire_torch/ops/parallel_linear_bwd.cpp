// The products of the backward pass of parallel_linear, with collectives beside them.
#include <ATen/ops/cat.h>

#include "quire_torch/ops/linear_grads.h"
#include "quire_torch/ops/parallel_bwd.h"
#include "quire_torch/ops/reduce.h"

namespace quire_torch {

using quire::Direction;

namespace {

/// dy of a rank in the way in which it is quantized.
struct Dy {
  at::Tensor values;
  int axis = -1;               ///< as Parallel::axis_of_dy(); -1 where values of all tokens were gathered
  bool gathers_codes = false;  ///< whether codes of this rank's tokens become those of all tokens
  DirectionBuffers rows{}, columns{};
  at::Tensor amax{};  ///< for the next step of delayed scaling
};

bool needs_rows(const LinearBwd::Args& args) { return (args.needs & kNeedsX) != 0; }
bool needs_columns(const LinearBwd::Args& args) { return (args.needs & (kNeedsW | kKeepsDy)) != 0; }

/// dy before it is quantized. Values are gathered where a part ends within a block.
Dy dy_of(const LinearBwd::Args& args, const Parallel& sharding) {
  if (!sharding.gathers_dy()) return {.values = args.dy, .axis = sharding.axis_of_dy()};
  const quire::QuantSpec& spec = args.recipe->dy;
  const c10::SymInt tokens = rows_of(args.dy);
  const bool codes = (!needs_rows(args) || gathers_codes(spec, Direction::rowwise, tokens)) &&
                     (!needs_columns(args) || gathers_codes(spec, Direction::columnwise, tokens));
  if (!codes) return {.values = gather(args.dy, sharding.group)};
  return {.values = args.dy, .axis = sharding.axis_of_dy(), .gathers_codes = true};
}

void quantize(Dy& dy, const LinearBwd::Args& args, const Parallel& sharding, const op::OptionalTensor& part) {
  const quire::QuantSpec& spec = args.recipe->dy;
  const bool rowwise = needs_rows(args);
  const auto codes = quantize_parts({{.t = dy.values,
                                      .spec = spec,
                                      .role = "dy",
                                      .rowwise = rowwise,
                                      .columnwise = needs_columns(args),
                                      .axis = dy.axis,
                                      .scale = slot(args.bwd_scale, 0),
                                      .sr_state = args.sr_state,
                                      .part = part}},
                                    sharding.group)[0];
  dy.rows = {codes[0], codes[1], codes[2]};
  dy.columns = {codes[3], codes[4], codes[5]};
  if (!args.bwd_scale) return;
  // Before a sum is under way: gloo is to have one collective at a time (collectives.h).
  dy.amax = reduced(rowwise ? codes[2] : codes[5], dy.axis, sharding.group);
  if (dy.axis < 0) return;
  dy.rows[1] = scale_of_whole(dy.rows[1], dy.amax, spec);
  dy.columns[1] = scale_of_whole(dy.columns[1], dy.amax, spec);
}

/// dx of the rows of dy.
at::Tensor dgrad(const LinearBwd::Args& args, const DirectionBuffers& rows, std::vector<c10::SymInt> shape,
                 at::ScalarType dtype) {
  return op::call<LinearDgrad>({.dy_data = rows[0],
                                .dy_scale = rows[1],
                                .dy_amax = rows[2],
                                .w_buffers = args.w_buffers,
                                .shape = std::move(shape),
                                .out_features = args.dy.sym_size(-1),
                                .recipe = args.recipe,
                                .dtype = dtype})[0];
}

/// Starts the sum of dx over the group, of rows of dy: where these are parts of a ring, in pieces.
Sums scattered_dgrad(const LinearBwd::Args& args, const Parallel& sharding, const DirectionBuffers& rows) {
  Sums sums;
  const at::ScalarType dtype = partial_dtype(sharding, args.dtype);
  const c10::SymInt own = rows_of(args.dy) / sharding.group.size;
  if (!sharding.ring || !gathers_codes(args.recipe->dy, Direction::rowwise, own)) {
    sums.started = {start_sum(dgrad(args, rows, sizes_with(args.dy, 1, args.in_features), dtype), sharding)};
    return sums;
  }
  const int64_t block = rows_of_block(args.recipe->dy, Direction::rowwise);
  for (int64_t i = 0; i < sharding.group.size; ++i) {
    const Cut piece = cut(i, own, block, sharding.group);
    const DirectionBuffers dy = rows_of(rows, args.recipe->dy, piece, sharding.group);
    const c10::SymInt length = piece.length * sharding.group.size;
    sums.start(dgrad(args, dy, {length, args.in_features}, dtype), sharding, piece);
  }
  return sums;
}

/// dx of each rank's rows of dy as they arrive.
at::Tensor dgrad_of_arrivals(const LinearBwd::Args& args, const Arrivals& dy) {
  op::TensorList dx;
  for (int64_t i = 0; i < dy.count(); ++i)
    dx.push_back(dgrad(args, dy.take(i), sizes_with(args.dy, 1, args.in_features), args.dtype));
  return at::cat(dx, 0);
}

at::Tensor wgrad(const LinearBwd::Args& args, const DirectionBuffers& columns, const c10::SymInt& tokens) {
  return op::call<LinearWgrad>({.dy_data = columns[0],
                                .dy_scale = columns[1],
                                .dy_amax = columns[2],
                                .x_data = args.x_data,
                                .x_scale = args.x_scale,
                                .x_amax = args.x_amax,
                                .tokens = tokens,
                                .out_features = args.dy.sym_size(-1),
                                .in_features = args.in_features,
                                .recipe = args.recipe,
                                .dtype = args.dtype})[0];
}

/// The sum of dy over rows, in dy's dtype. Where dy has the tokens of this rank alone, the ranks add theirs.
at::Tensor bias_gradient(const LinearBwd::Args& args, const Parallel& sharding, const Dy& dy) {
  LinearBwd::Args of_bias = args;
  of_bias.dy = sharding.own_gradients ? args.dy : dy.values;
  of_bias.needs = kNeedsBias;
  const at::Tensor dbias = op::call<LinearBwd>(of_bias)[2];
  return dy.gathers_codes && !sharding.own_gradients ? sum(dbias, sharding.group) : dbias;
}

/// dx and dw, or columnwise dy in its place, of a dy that is quantized.
void multiply(const LinearBwd::Args& args, const Parallel& sharding, Dy& dy, ParallelGradients& found) {
  const quire::QuantSpec& spec = args.recipe->dy;
  const bool rowwise = needs_rows(args), arrives = dy.gathers_codes && sharding.ring;
  if (rowwise && arrives)
    found.values[0] = dgrad_of_arrivals(args, Arrivals(dy.rows, spec, sharding.group, false));
  else if (rowwise && dy.gathers_codes)
    dy.rows = gather(dy.rows, spec, Direction::rowwise, sharding.group, false);
  if (needs_columns(args) && dy.gathers_codes)
    dy.columns = gather(dy.columns, spec, Direction::columnwise, sharding.group, false);
  if (rowwise && sharding.sums_dx())
    found.dx = scattered_dgrad(args, sharding, dy.rows);
  else if (rowwise && !arrives)
    found.values[0] = dgrad(
        args, dy.rows, sizes_with(dy.values, dy.gathers_codes ? sharding.group.size : 1, args.in_features), args.dtype);
  if (args.needs & kNeedsW) found.values[1] = wgrad(args, dy.columns, found.tokens);
  if (args.needs & kKeepsDy) std::copy(dy.columns.begin(), dy.columns.end(), found.values.begin() + 3);
  if (args.bwd_scale) found.values[5] = dy.amax;
}

}  // namespace

ParallelGradients parallel_linear_bwd(const LinearBwd::Args& args, const Parallel& sharding,
                                      const op::OptionalTensor& part) {
  Dy dy = dy_of(args, sharding);
  ParallelGradients found{.values = {}, .tokens = rows_of(dy.values) * (dy.gathers_codes ? sharding.group.size : 1)};
  for (at::Tensor& t : found.values) t = dy.values.new_empty({0});
  if (needs_rows(args) || needs_columns(args)) {
    quantize(dy, args, sharding, part);
    multiply(args, sharding, dy, found);
  }
  if (args.needs & kNeedsBias) found.values[2] = bias_gradient(args, sharding, dy);
  return found;
}

std::vector<c10::SymInt> sizes_of_dx(const at::Tensor& dy, const Parallel& sharding, const c10::SymInt& in_features) {
  auto sizes = dy.sym_sizes().vec();
  if (sharding.column && sharding.sequence) sizes.front() = sizes.front() / sharding.group.size;
  sizes.back() = in_features;
  return sizes;
}

op::Tensors<3> parallel_unquantized_bwd(LinearUnquantizedBwd::Args args, const Parallel& sharding) {
  if (!sharding.sums_dx()) return op::call<LinearUnquantizedBwd>(args);
  // dx first and apart, so that its sum runs beside the rest.
  const int64_t needs = args.needs;
  const at::Tensor dy = args.dy;
  Sums dx;
  args.needs = needs & kNeedsX;
  if (args.needs && !sharding.ring) dx.started = {start_sum(op::call<LinearUnquantizedBwd>(args)[0], sharding)};
  for (int64_t i = 0; args.needs && sharding.ring && i < sharding.group.size; ++i) {
    const Cut piece = cut(i, rows_of(dy) / sharding.group.size, 1, sharding.group);
    args.dy = rows_of(dy, piece, sharding.group);
    dx.start(op::call<LinearUnquantizedBwd>(args)[0], sharding, piece);
  }
  args.dy = dy;
  args.needs = needs & ~kNeedsX;
  op::Tensors<3> found = op::call<LinearUnquantizedBwd>(args);
  if (needs & kNeedsX) found[0] = dx.wait(sharding, sizes_of_dx(dy, sharding, args.in_features), args.dtype);
  return found;
}

at::Tensor dx_of_arrivals(LinearUnquantizedBwd::Args args, const Parallel& sharding, at::Tensor& dy) {
  const Arrivals arrivals(dy, sharding.group);
  args.needs = kNeedsX;
  op::TensorList whole, dx;
  for (int64_t i = 0; i < arrivals.count(); ++i) {
    whole.push_back(args.dy = arrivals.take(i)[0]);
    dx.push_back(op::call<LinearUnquantizedBwd>(args)[0]);
  }
  dy = at::cat(whole, 0);
  return at::cat(dx, 0);
}

}  // namespace quire_torch
