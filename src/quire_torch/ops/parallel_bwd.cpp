#include "quire_torch/ops/parallel_bwd.h"

#include "quire_torch/ops/grouped_linear_bwd.h"
#include "quire_torch/ops/state.h"

namespace quire_torch {
namespace {

using quire::Backward, quire::Direction;

const quire::QuantSpec& spec_of_x(const ParallelSaved& s) { return (*s.recipe)->x; }

/// x itself, which forward kept, of the tokens of all ranks. after: what a graph is to wait for.
at::Tensor whole_x(const ParallelSaved& s, const at::Tensor& after) {
  const Parallel& sharding = **s.parallel;
  return sharding.gathers_x() ? gather(tied(s.x_data, after), sharding.group) : s.x_data;
}

/// Codes of x that forward kept, likewise.
DirectionBuffers whole_codes(const ParallelSaved& s, Direction direction, const at::Tensor& after) {
  const Parallel& sharding = **s.parallel;
  if (!sharding.gathers_x()) return {s.x_data, s.x_scale, s.x_amax};
  const bool given_scale = spec_of_x(s).given || s.bwd_scale.defined();
  return gather({tied(s.x_data, after), tied(s.x_scale, after), s.x_amax}, spec_of_x(s), direction, sharding.group,
                given_scale);
}

/// x of all tokens in the direction that backward reads, quantized now as it was in forward.
DirectionBuffers quantized_x(const ParallelSaved& s, bool columnwise, const at::Tensor& after) {
  const Parallel& sharding = **s.parallel;
  const quire::QuantSpec& spec = spec_of_x(s);
  const auto codes = quantize_parts({{.t = whole_x(s, after),
                                      .spec = spec,
                                      .role = "x",
                                      .rowwise = !columnwise,
                                      .columnwise = columnwise,
                                      .axis = sharding.gathers_x() ? -1 : sharding.axis_of_x(),
                                      .scale = spec.given ? std::optional(s.x_scale) : std::nullopt,
                                      .offsets = s.offsets}},
                                    sharding.group)[0];
  const size_t first = columnwise ? 3 : 0;
  return {codes[first], codes[first + 1], codes[first + 2]};
}

DirectionBuffers columnwise_x(const ParallelSaved& s, const at::Tensor& dy, op::Needs need) {
  if (!need[kW]) return {s.x_data, s.x_scale, s.x_amax};
  if ((*s.recipe)->backward == Backward::requantized || s.x_itself) return quantized_x(s, true, dy);
  return whole_codes(s, Direction::columnwise, dy);
}

/// x as a backward pass multiplies it that does not multiply codes; dy: of as many tokens.
at::Tensor values_of_x(const ParallelSaved& s, const at::Tensor& dy) {
  if (keeps_x(s.recipe)) return whole_x(s, dy);
  return decode(s, s.x_itself ? quantized_x(s, false, dy) : whole_codes(s, Direction::rowwise, dy), spec_of_x(s), dy);
}

/// dx, which is sharded as x is, as its quantized values.
at::Tensor rounded_dx(const ParallelSaved& s, const quire::QuantSpec& spec, const at::Tensor& dx) {
  const Parallel& sharding = **s.parallel;
  const int axis = sharding.axis_of_x();
  const op::OptionalTensor scale = scale_of_dx(s);
  const auto codes =
      quantize_parts({{.t = dx, .spec = spec, .axis = axis, .scale = scale, .offsets = s.offsets}}, sharding.group)[0];
  if (scale && s.bwd_amax.tensor.defined())
    op::call<AmaxMax>({{s.bwd_amax.tensor}, reduced(codes[2], axis, sharding.group), 1});
  return decode(s, {codes[0], codes[1], codes[2]}, spec, dx);
}

op::Tensors<3> quantized_backward(const ParallelSaved& s, const at::Tensor& dy, op::Needs need) {
  const Parallel& sharding = **s.parallel;
  const LinearBwd::Args args = quantized_arguments(s, dy, columnwise_x(s, dy, need), need);
  auto [found, sum_of_dx, tokens] =
      s.offsets ? parallel_groups_bwd(args, sharding, s.part) : parallel_linear_bwd(args, sharding, s.part);
  // First what may still refuse its operands, so that a refused call has changed nothing, and while dx is on its way.
  if (need[kW] && goes_elsewhere(s)) found[1] = put_elsewhere(s, args, found, std::move(tokens));
  if (sharding.sums_dx() && need[kX])
    found[0] = sum_of_dx.wait(sharding, sizes_of_dx(dy, sharding, s.in_features), s.dtype);
  if (args.sr_state) op::call<SrAdvance>({.sr_state = {*args.sr_state}});
  if (args.bwd_scale && s.bwd_amax.tensor.defined()) op::call<AmaxMax>({{s.bwd_amax.tensor}, found[5], 0});
  if (need[kX] && args.recipe->dx) found[0] = rounded_dx(s, *args.recipe->dx, found[0]);
  return {found[0], found[1], found[2]};
}

op::Tensors<3> unquantized_backward(const ParallelSaved& s, const at::Tensor& own_dy, op::Needs need) {
  const Parallel& sharding = **s.parallel;
  LinearUnquantizedBwd::Args args = unquantized_arguments(s, own_dy, need);
  at::Tensor dx;  // of a dy that comes in pieces
  if (sharding.gathers_dy() && sharding.ring && need[kX]) {
    dx = dx_of_arrivals(args, sharding, args.dy);
    args.needs &= ~kNeedsX;
  } else if (sharding.gathers_dy()) {
    args.dy = gather(own_dy, sharding.group);
  }
  if (need[kW]) args.x = values_of_x(s, args.dy);
  op::Tensors<3> found = parallel_unquantized_bwd(args, sharding);
  if (dx.defined()) found[0] = dx;
  if (sharding.own_gradients && sharding.gathers_dy() && need[kBias]) {
    LinearUnquantizedBwd::Args of_bias = args;
    of_bias.dy = own_dy;
    of_bias.needs = kNeedsBias;
    found[2] = op::call<LinearUnquantizedBwd>(of_bias)[2];
  }
  if (need[kW] && goes_elsewhere(s)) found[1] = put_elsewhere(s, args, found[1]);
  return found;
}

}  // namespace

op::Tensors<3> parallel_gradients(const ParallelSaved& s, const at::Tensor& dy, op::Needs need) {
  Destinations::of(s).check(dy.device(), groups_of(s.offsets), {dy.sym_size(-1), s.in_features});
  return from_codes(mode_of(s.recipe)) ? quantized_backward(s, dy, need) : unquantized_backward(s, dy, need);
}

}  // namespace quire_torch
