#include "quire_torch/ops/parallel_linear.h"

#include <ATen/ops/cat.h>

#include "quire_torch/ops/agree.h"
#include "quire_torch/ops/reduce.h"
#include "quire_torch/ops/ring.h"

namespace quire_torch {
namespace {

using quire::Backward, quire::Direction;

/// The product of this rank, as backward is to know it.
GroupedLinear::Args own_product(const ParallelLinear::Args& a) {
  return {.x = a.x,
          .w = {{a.w}},
          .bias = {a.bias && (*a.parallel)->column ? op::TensorList{*a.bias} : op::TensorList()},
          .offsets = std::nullopt,
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

/// What the product of this rank multiplies, and what is kept of x.
struct Operands {
  GroupedLinear::Args args;
  DirectionBuffers kept;
  bool keeps = false;                  ///< whether `kept` says what backward needs of x; else forward kept it
  bool plain = false;                  ///< whether that is x itself
  at::Tensor x_amax{}, w_amax{};       ///< of delayed scaling, where x or w was quantized here
  std::optional<Arrivals> arrivals{};  ///< x, where it comes in pieces
};

DirectionBuffers itself(const at::Tensor& x) { return {x, x.new_empty({0}), x.new_empty({0})}; }

/// x itself as what is kept of it, with its static scale.
DirectionBuffers kept_x(const ParallelLinear::Args& a) {
  return {a.x, a.input_scale ? *a.input_scale : a.x.new_empty({0}), a.x.new_empty({0})};
}

/// The scale that x does not get from its own amax.
op::OptionalTensor scale_of_x(const ParallelLinear::Args& a) {
  return a.input_scale ? a.input_scale : slot(a.fwd_scale, 0);
}

/// Six buffers of which there are those of one direction.
op::OptionalTensorList rowwise_only(const DirectionBuffers& rows) {
  return {rows[0], rows[1], rows[2], std::nullopt, std::nullopt, std::nullopt};
}

/// How x is quantized apart from the product, because its scale is given, or an amax or codes of other ranks are
/// needed in between.
Part part_of_x(const ParallelLinear::Args& a, bool keep) {
  const Parallel& p = **a.parallel;
  const quire::LinearSpec& recipe = **a.recipe;
  const bool columnwise = keep && recipe.backward == Backward::quantized &&
                          (!p.gathers_x() || gathers_codes(recipe.x, Direction::columnwise, rows_of(a.x)));
  return {.t = a.x, .spec = recipe.x, .columnwise = columnwise, .axis = p.axis_of_x(), .scale = scale_of_x(a)};
}

/// The product's x, and what is kept of it, of x quantized like that.
void take_x(const ParallelLinear::Args& a, bool keep, const Part& part, const op::Tensors<6>& q, Operands& o) {
  const Parallel& p = **a.parallel;
  const Backward mode = (*a.recipe)->backward;
  DirectionBuffers rows{q[0], q[1], q[2]};
  if (a.fwd_scale) o.x_amax = q[2];
  if (keep) {
    o.keeps = true;
    o.plain = mode == Backward::quantized && !part.columnwise;
    if (mode == Backward::dequantized)
      o.kept = rows;
    else if (part.columnwise)
      o.kept = {q[3], q[4], q[5]};
    else
      o.kept = kept_x(a);
  }
  if (p.gathers_x()) {
    if (p.ring)
      o.arrivals.emplace(rows, part.spec, p.group, part.scale.has_value());
    else
      rows = gather(rows, part.spec, Direction::rowwise, p.group, part.scale.has_value());
    o.args.x = a.x.new_empty({1}).expand_symint(sizes_with(a.x, p.group.size, a.x.sym_size(-1)));
  }
  o.args.x_buffers = rowwise_only(rows);
}

/// The product's x, and what is kept of it, of values that come together, because codes cannot.
void take_values(const ParallelLinear::Args& a, bool keep, bool quantizes_x, Operands& o) {
  const Parallel& p = **a.parallel;
  const at::Tensor x = agreed(a.x);
  if (p.ring && !quantizes_x)
    o.arrivals.emplace(x, p.group);
  else
    o.args.x = gather(x, p.group);
  if (keep) o.kept = kept_x(a), o.keeps = o.plain = true;
  if (!a.input_scale) return;
  const auto q = quantize_parts({{.t = o.args.x, .spec = (*a.recipe)->x, .scale = a.input_scale}}, p.group)[0];
  o.args.x_buffers = rowwise_only({q[0], q[1], q[2]});
}

/// Whether y is scattered in pieces.
bool scatters_pieces(const ParallelLinear::Args& a) {
  const Parallel& p = **a.parallel;
  return p.ring && !p.column &&
         (!a.recipe->has_value() || (*a.recipe)->weight_only ||
          gathers_codes((*a.recipe)->x, Direction::rowwise, rows_of(a.x) / p.group.size));
}

Operands operands(const ParallelLinear::Args& a, op::Needs need) {
  Operands o{.args = own_product(a), .kept = {}};
  const Parallel& p = **a.parallel;
  if (!p.column && a.recipe->has_value()) o.args.dtype = partial_dtype(p, a.dtype);
  const bool quantizes = a.recipe->has_value(), keep = need[kW];
  const bool quantizes_x = quantizes && !(*a.recipe)->weight_only;
  const bool codes = quantizes_x && p.gathers_x() && gathers_codes((*a.recipe)->x, Direction::rowwise, rows_of(a.x));
  const bool pieces = quantizes && (p.gathers_x() ? p.ring && (codes || !quantizes_x) : scatters_pieces(a));
  const bool scaled_apart =
      a.input_scale || (quantizes_x && !a.fwd_scale && needs_reduction((*a.recipe)->x, p.axis_of_x()));
  const bool apart = quantizes_x && (codes || pieces || (!p.gathers_x() && scaled_apart));
  if (p.gathers_x() && !codes) take_values(a, keep, quantizes_x, o);
  std::vector<Part> parts;
  if (apart) parts.push_back(part_of_x(a, keep));
  // Of pieces once, and not with each of them.
  const bool w_apart =
      quantizes && a.w_buffers.empty() && (pieces || (!a.fwd_scale && needs_reduction((*a.recipe)->w, p.axis_of_w())));
  if (w_apart)
    parts.push_back({.t = a.w,
                     .spec = (*a.recipe)->w,
                     .columnwise = need[kX] && from_codes((*a.recipe)->backward),
                     .axis = p.axis_of_w(),
                     .scale = slot(a.fwd_scale, 1)});
  const auto q = quantize_parts(parts, p.group);
  if (apart) take_x(a, keep, parts[0], q[0], o);
  if (w_apart) {
    o.args.w_buffers = {q.back().begin(), q.back().end()};
    if (a.fwd_scale) o.w_amax = q.back()[2];
    if (!parts.back().columnwise) std::fill_n(o.args.w_buffers.begin() + 3, 3, std::nullopt);
  }
  return o;
}

void check(const ParallelLinear::Args& a, op::Needs need) {
  quire::check(a.parallel->has_value(),
               "parallel_linear: parallel must say how w is sharded, got ''; call linear for a ", "weight that is not");
  const Parallel& p = **a.parallel;
  check_input_scale(a.recipe, a.input_scale, a.fwd_scale, need[kW] && keeps_x(a.recipe), "parallel_linear");
  GroupedLinear::check(own_product(a), need);
  quire::check(!p.sequence || a.x.dim() >= 2,
               "parallel_linear: tokens are sharded along the first dimension, and x is ",
               "one token [K]; pass [tokens, K]");
  quire::check(p.column || !p.sequence || (a.x.sym_size(0) % p.group.size).sym_eq(0).guard_bool(__FILE__, __LINE__),
               "parallel_linear: the first dimension of x must be a multiple of the ", p.group.size, " ranks of '",
               p.group.name, "', which get equal parts of y; got ", a.x.sym_sizes());
  const bool draws = a.recipe->has_value() && from_codes((*a.recipe)->backward) && (*a.recipe)->dy.stochastic;
  quire::check(a.part || !draws || p.axis_of_dy() < 0 || (!need[kX] && !need[kW]),
               "parallel_linear: dy rounds stochastically, and each rank needs its own bits: part must be an int64 ",
               "tensor {index, size}, got none. quire.Linear has one");
}

/// y of the whole product: a partial sum's sum over the group, and then bias.
at::Tensor whole(const ParallelLinear::Args& a, const at::Tensor& y) {
  const Parallel& p = **a.parallel;
  if (p.column) return y;
  auto sizes = y.sym_sizes().vec();
  if (p.sequence) sizes[0] = sizes[0] / p.group.size;
  return wait_for_sum(start_sum(y, p), p, sizes, a.dtype, a.bias);
}

/// A product of x [sizes], of which backward keeps nothing.
at::Tensor product_of(GroupedLinear::Args args, const DirectionBuffers& rows, const std::vector<c10::SymInt>& sizes) {
  if (args.x_buffers.empty()) {
    args.x = rows[0];
  } else {
    args.x = args.x.new_empty({1}).expand_symint(sizes);
    std::copy(rows.begin(), rows.end(), args.x_buffers.begin());
  }
  return GroupedLinear::product(args, {}).first[0];
}

/// Each rank's rows of y as those of x arrive.
at::Tensor product_of_arrivals(const ParallelLinear::Args& a, const Operands& o) {
  op::TensorList y;
  for (int64_t i = 0; i < o.arrivals->count(); ++i)
    y.push_back(product_of(o.args, o.arrivals->take(i), a.x.sym_sizes().vec()));
  return at::cat(y, 0);
}

/// y of this rank's tokens: the sum of one piece is under way while the next one is multiplied.
at::Tensor scattered_product(const ParallelLinear::Args& a, const Operands& o) {
  const Parallel& p = **a.parallel;
  const c10::SymInt rows = rows_of(a.x) / p.group.size;
  const bool codes = !o.args.x_buffers.empty();
  DirectionBuffers x{a.x, a.x, a.x};
  for (size_t i = 0; codes && i < x.size(); ++i) x[i] = *o.args.x_buffers[i];
  const int64_t block = codes ? rows_of_block((*a.recipe)->x, Direction::rowwise) : 1;
  Sums sums;
  for (int64_t i = 0; i < p.group.size; ++i) {
    const Cut piece = cut(i, rows, block, p.group);
    const DirectionBuffers own =
        codes ? rows_of(x, (*a.recipe)->x, piece, p.group) : itself(rows_of(a.x, piece, p.group));
    const at::Tensor y = product_of(o.args, own, {piece.length * p.group.size, a.x.sym_size(-1)});
    if (i == 0) agree_before(y);
    sums.start(y, p, piece);
  }
  auto sizes = sizes_with(a.x, 1, a.w.sym_size(0));
  sizes[0] = sizes[0] / p.group.size;
  return sums.wait(p, sizes, a.dtype, a.bias);
}

}  // namespace

op::Tensors<3> ParallelLinear::inference(const Args& a) { return forward(a, {}).first; }

std::pair<op::Tensors<3>, ParallelLinear::Saved> ParallelLinear::forward(const Args& a, op::Needs need) {
  std::string layer = take_next_caller();
  check(a, need);
  const Caller caller(layer);
  const Agreement agreement(layer, {.t = {a.x},
                                    .tokens = rows_of(a.x),
                                    .in_features = a.w.sym_size(1),
                                    .out_features = a.w.sym_size(0),
                                    .recipe = a.recipe,
                                    .parallel = a.parallel});
  const Operands o = operands(a, need);
  op::Needs of_product = need;
  if (o.keeps) of_product.bits &= ~(int64_t{1} << kW);
  const bool arrive = o.arrivals.has_value(), scatter = scatters_pieces(a), pieces = arrive || scatter;
  const auto absent = [&] { return a.x.new_empty({0}, at::kFloat); };
  op::Tensors<7> r;
  DirectionBuffers x;
  if (pieces)
    r[0] = arrive ? product_of_arrivals(a, o) : scattered_product(a, o), x = itself(need[kW] ? a.x : absent());
  else
    std::tie(r, x) = GroupedLinear::product(o.args, of_product), agree_before(r[0]);
  const bool high = mode_of(a.recipe) == Backward::high_precision;
  GroupedLinear::Args given = high ? own_product(a) : o.args;
  given.dtype = a.dtype;
  Saved s = GroupedLinear::saved(given, o.keeps ? o.kept : x, r, need);
  s.parallel = a.parallel;
  s.part = a.part;
  s.layer = std::move(layer);
  s.x_plain = o.plain;
  op::Tensors<3> results{scatter ? r[0] : whole(a, r[0]), pieces ? absent() : r[3], pieces ? absent() : r[6]};
  if (a.fwd_scale) {
    const Parallel& p = **a.parallel;
    results[1] = reduced(o.x_amax.defined() ? o.x_amax : r[3],
                         o.x_amax.defined() || !p.gathers_x() ? p.axis_of_x() : -1, p.group);
    if (a.w_buffers.empty()) results[2] = reduced(o.w_amax.defined() ? o.w_amax : r[6], p.axis_of_w(), p.group);
  }
  return {std::move(results), std::move(s)};
}

op::Tensors<11> ParallelLinear::backward(const Saved& s, const op::Tensors<3>& grads, op::Needs need) {
  const Caller caller(s.layer);
  auto [dx, dw, dbias] = GroupedLinear::gradients(s, grads[0], need);
  return {std::move(dx), std::move(dw), std::move(dbias), {}, {}, {}, {}, {}, {}, {}, {}};
}

}  // namespace quire_torch
