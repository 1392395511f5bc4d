// The forward pass of a linear whose weight is sharded over n ranks. What each rank has, in the four cases:
//
//                     column          column, sequence     row            row, sequence
//   w                 [N / n, K]      [N / n, K]           [N, K / n]     [N, K / n]
//   bias              [N / n]         [N / n]              [N]            [N]
//   forward
//     x               [T, *, K]       [T / n, *, K]        [T, *, K / n]  [T, *, K / n]
//     gathered        -               x                    -              -
//     amaxes reduced  w               x, w                 x, w           x, w
//     y               [T, *, N / n]   [T, *, N / n]        [T, *, N]      [T / n, *, N]
//     summed          -               -                    y: all_reduce  y: reduce_scatter
//   backward, of a dy that is sharded as y is, to a dx as x is
//     gathered        -               x, for dw            -              dy
//     amaxes reduced  dy              dy, dx               dx             dy, dx
//     summed          dx: all_reduce  dx: reduce_scatter   -              dbias: all_reduce
//
// * A gather is of codes: each rank quantizes its tokens under the amaxes of all. It is of values where nothing is
//   quantized, or where a part ends within a block. Then every rank quantizes the whole, which needs no reduction, and
//   its dbias is whole too. With own_gradients somebody else sums dbias.
// * Amaxes are reduced where a scale follows from the amax of the whole tensor, and where delayed scaling collects
//   amaxes; those of dx, where the recipe rounds it. A layer that keeps x itself quantizes it again in backward.
// * With reduce= a sum is an all_to_all, and an addition in float32 (reduce.h).
// * With overlap=ring a gather is a broadcast from each rank, whose rows are multiplied when they are there. A sum is
//   one of each piece of the rows, which runs while the next piece is multiplied (ring.h).
#include "quire_torch/ops/parallel_linear.h"

#include <ATen/ops/cat.h>

#include "quire_torch/ops/agree.h"
#include "quire_torch/ops/reduce.h"

namespace quire_torch {
namespace {

using quire::Backward, quire::Direction;

/// The product of this rank, as backward is to know it.
GroupedLinear::Args own_product(const ParallelLinear::Args& call) {
  GroupedLinear::Args product = as_given(call);
  product.w.tensors = {call.w};
  if (call.bias && !(*call.parallel)->sums_y()) product.bias.tensors = {*call.bias};
  return product;
}

enum class WayOfX {
  as_it_is,         ///< the product quantizes it, if anything does
  quantized_first,  ///< because that takes amaxes of other ranks, or the caller's scale, or is done once for all pieces
  gathered_codes,   ///< quantized first, of this rank's tokens
  gathered_values,
};

/// How operands come to the product of a rank, and y from it.
struct Exchange {
  WayOfX x = WayOfX::as_it_is;
  bool quantizes_w = false;  ///< before the product, for the reasons of WayOfX::quantized_first
  bool x_arrives = false;    ///< x is multiplied rank by rank, as it comes
  bool y_in_pieces = false;  ///< pieces of y are summed while others are multiplied

  bool quantizes_x() const { return x == WayOfX::quantized_first || x == WayOfX::gathered_codes; }
  bool has_pieces() const { return x_arrives || y_in_pieces; }
};

Exchange exchange_of(const ParallelLinear::Args& call) {
  const Parallel& sharding = **call.parallel;
  const quire::LinearSpec* recipe = call.recipe->has_value() ? &**call.recipe : nullptr;
  const bool codes = recipe && !recipe->weight_only;
  // Whether parts of x of so many rows each have the codes of the whole.
  const auto whole_blocks = [&](const c10::SymInt& rows) { return gathers_codes(recipe->x, Direction::rowwise, rows); };
  Exchange exchange;
  if (sharding.gathers_x()) {
    exchange.x = codes && whole_blocks(rows_of(call.x)) ? WayOfX::gathered_codes : WayOfX::gathered_values;
    exchange.x_arrives = sharding.ring && (exchange.quantizes_x() || !codes);
  } else {
    exchange.y_in_pieces = sharding.ring && (!codes || whole_blocks(rows_of(call.x) / sharding.group.size));
    if (codes && (exchange.y_in_pieces || call.input_scale ||
                  (!call.fwd_scale && needs_reduction(recipe->x, sharding.axis_of_x()))))
      exchange.x = WayOfX::quantized_first;
  }
  exchange.quantizes_w =
      recipe && call.w_buffers.empty() &&
      (exchange.has_pieces() || (!call.fwd_scale && needs_reduction(recipe->w, sharding.axis_of_w())));
  return exchange;
}

/// What the product of this rank multiplies.
struct Operands {
  GroupedLinear::Args product;
  std::optional<Arrivals> arrivals{};        ///< x, where it comes rank by rank
  std::optional<DirectionBuffers> kept_x{};  ///< what backward needs of x, where the product does not know that
  bool keeps_x_itself = false;               ///< whether that is x
  at::Tensor x_amax{}, w_amax{};             ///< of delayed scaling, where x or w was quantized here
};

DirectionBuffers values_alone(const at::Tensor& x) { return {x, x.new_empty({0}), x.new_empty({0})}; }

/// x itself as what is kept of it, with its static scale.
DirectionBuffers x_itself(const ParallelLinear::Args& call) {
  return {call.x, call.input_scale ? *call.input_scale : call.x.new_empty({0}), call.x.new_empty({0})};
}

/// Six buffers of which there are those of one direction.
op::OptionalTensorList rowwise_only(const DirectionBuffers& rows) {
  return {rows[0], rows[1], rows[2], std::nullopt, std::nullopt, std::nullopt};
}

Part part_of_x(const ParallelLinear::Args& call, op::Needs need) {
  const Parallel& sharding = **call.parallel;
  const quire::LinearSpec& recipe = **call.recipe;
  // Backward gathers columnwise codes that forward made, if they can be gathered.
  const bool columnwise = need[kW] && recipe.backward == Backward::quantized &&
                          (!sharding.gathers_x() || gathers_codes(recipe.x, Direction::columnwise, rows_of(call.x)));
  return {.t = call.x,
          .spec = recipe.x,
          .role = "x",
          .columnwise = columnwise,
          .axis = sharding.axis_of_x(),
          .scale = call.input_scale ? call.input_scale : slot(call.fwd_scale, 0)};
}

Part part_of_w(const ParallelLinear::Args& call, op::Needs need) {
  const quire::LinearSpec& recipe = **call.recipe;
  return {.t = call.w,
          .spec = recipe.w,
          .role = "w",
          .columnwise = need[kX] && from_codes(recipe.backward),
          .axis = (*call.parallel)->axis_of_w(),
          .scale = slot(call.fwd_scale, 1)};
}

/// What is kept of x, whose codes are these, of this rank's tokens.
void keep_x(const ParallelLinear::Args& call, const Part& x, const op::Tensors<6>& codes, Operands& operands) {
  const Backward mode = (*call.recipe)->backward;
  operands.keeps_x_itself = mode == Backward::quantized && !x.columnwise;
  if (mode == Backward::dequantized)
    operands.kept_x = {codes[0], codes[1], codes[2]};
  else if (x.columnwise)
    operands.kept_x = {codes[3], codes[4], codes[5]};
  else
    operands.kept_x = x_itself(call);
}

/// Gives the product codes of x, of all tokens.
void give_codes(const ParallelLinear::Args& call, const Exchange& exchange, const Part& x, const op::Tensors<6>& codes,
                Operands& operands) {
  const Group& group = (*call.parallel)->group;
  DirectionBuffers rows{codes[0], codes[1], codes[2]};
  if (call.fwd_scale) operands.x_amax = codes[2];
  if (exchange.x == WayOfX::gathered_codes) {
    if (exchange.x_arrives)
      operands.arrivals.emplace(rows, x.spec, group, x.scale.has_value());
    else
      rows = gather(rows, x.spec, Direction::rowwise, group, x.scale.has_value());
    operands.product.x = call.x.new_empty({1}).expand_symint(sizes_with(call.x, group.size, call.x.sym_size(-1)));
  }
  operands.product.x_buffers = rowwise_only(rows);
}

/// Gives the product x of all tokens, whose values are gathered; keeps: whether backward needs it.
void give_values(const ParallelLinear::Args& call, const Exchange& exchange, bool keeps, Operands& operands) {
  const Group& group = (*call.parallel)->group;
  const at::Tensor own = agreed(call.x);
  if (exchange.x_arrives)
    operands.arrivals.emplace(own, group);
  else
    operands.product.x = gather(own, group);
  if (keeps) operands.kept_x = x_itself(call), operands.keeps_x_itself = true;
  if (!call.input_scale) return;
  const auto codes = quantize_parts(
      {{.t = operands.product.x, .spec = (*call.recipe)->x, .role = "x", .scale = call.input_scale}}, group)[0];
  operands.product.x_buffers = rowwise_only({codes[0], codes[1], codes[2]});
}

/// Gives the product codes of w.
void give_w(const ParallelLinear::Args& call, const Part& w, const op::Tensors<6>& codes, Operands& operands) {
  auto& buffers = operands.product.w_buffers;
  buffers = {codes.begin(), codes.end()};
  if (!w.columnwise) std::fill_n(buffers.begin() + 3, 3, std::nullopt);
  if (call.fwd_scale) operands.w_amax = codes[2];
}

Operands operands_of(const ParallelLinear::Args& call, const Exchange& exchange, op::Needs need) {
  const Parallel& sharding = **call.parallel;
  Operands operands{.product = own_product(call)};
  if (sharding.sums_y() && call.recipe->has_value()) operands.product.dtype = partial_dtype(sharding, call.dtype);
  if (exchange.x == WayOfX::gathered_values) give_values(call, exchange, need[kW], operands);
  std::vector<Part> parts;  // whose amaxes are reduced together
  if (exchange.quantizes_x()) parts.push_back(part_of_x(call, need));
  if (exchange.quantizes_w) parts.push_back(part_of_w(call, need));
  const std::vector<op::Tensors<6>> codes = quantize_parts(parts, sharding.group);
  if (exchange.quantizes_x()) {
    if (need[kW]) keep_x(call, parts.front(), codes.front(), operands);
    give_codes(call, exchange, parts.front(), codes.front(), operands);
  }
  if (exchange.quantizes_w) give_w(call, parts.back(), codes.back(), operands);
  return operands;
}

void check(const ParallelLinear::Args& call, op::Needs need) {
  quire::check(call.parallel->has_value(),
               "parallel_linear: parallel must say how w is sharded, got ''; call linear for a ", "weight that is not");
  const Parallel& sharding = **call.parallel;
  check_input_scale(call.recipe, call.input_scale, call.fwd_scale, need[kW] && keeps_x(call.recipe), "parallel_linear");
  GroupedLinear::check(own_product(call), need);
  quire::check(!sharding.sequence || call.x.dim() >= 2,
               "parallel_linear: tokens are sharded along the first dimension, and x is ",
               "one token [K]; pass [tokens, K]");
  quire::check(sharding.column || !sharding.sequence ||
                   (call.x.sym_size(0) % sharding.group.size).sym_eq(0).guard_bool(__FILE__, __LINE__),
               "parallel_linear: the first dimension of x must be a multiple of the ", sharding.group.size,
               " ranks of '", sharding.group.name, "', which get equal parts of y; got ", call.x.sym_sizes());
  const bool draws = call.recipe->has_value() && from_codes((*call.recipe)->backward) && (*call.recipe)->dy.stochastic;
  quire::check(call.part || !draws || sharding.axis_of_dy() < 0 || (!need[kX] && !need[kW]),
               "parallel_linear: dy rounds stochastically, and each rank needs its own bits: part must be an int64 ",
               "tensor {index, size}, got none. quire.Linear has one");
}

/// The sizes of y of this rank, where it is a sum: of a product of these sizes.
std::vector<c10::SymInt> sizes_of_sum(std::vector<c10::SymInt> sizes, const Parallel& sharding) {
  if (sharding.sequence) sizes[0] = sizes[0] / sharding.group.size;
  return sizes;
}

/// y, of the product of a rank: where that is a part of a sum the sum over the group, and then bias.
at::Tensor whole_y(const ParallelLinear::Args& call, const at::Tensor& y) {
  const Parallel& sharding = **call.parallel;
  if (!sharding.sums_y()) return y;
  const auto sizes = sizes_of_sum(y.sym_sizes().vec(), sharding);
  return wait_for_sum(start_sum(y, sharding), sharding, sizes, call.dtype, call.bias);
}

/// The product of a piece of x [sizes], of which backward keeps nothing.
at::Tensor product_of_piece(GroupedLinear::Args product, const DirectionBuffers& x,
                            const std::vector<c10::SymInt>& sizes) {
  if (product.x_buffers.empty()) {
    product.x = x[0];
  } else {
    product.x = product.x.new_empty({1}).expand_symint(sizes);
    std::copy(x.begin(), x.end(), product.x_buffers.begin());
  }
  return GroupedLinear::product(product, {}).first[0];
}

/// Each rank's rows of y as those of x arrive.
at::Tensor product_of_arrivals(const ParallelLinear::Args& call, const Operands& operands) {
  op::TensorList y;
  for (int64_t i = 0; i < operands.arrivals->count(); ++i)
    y.push_back(product_of_piece(operands.product, operands.arrivals->take(i), call.x.sym_sizes().vec()));
  return at::cat(y, 0);
}

/// y of this rank's tokens: the sum of one piece is under way while the next one is multiplied.
at::Tensor sum_of_pieces(const ParallelLinear::Args& call, const Operands& operands) {
  const Parallel& sharding = **call.parallel;
  const c10::SymInt rows = rows_of(call.x) / sharding.group.size;
  const auto& buffers = operands.product.x_buffers;
  const bool codes = !buffers.empty();
  DirectionBuffers x;
  if (codes) x = {*buffers[0], *buffers[1], *buffers[2]};
  const int64_t block = codes ? rows_of_block((*call.recipe)->x, Direction::rowwise) : 1;
  Sums sums;
  for (int64_t i = 0; i < sharding.group.size; ++i) {
    const Cut piece = cut(i, rows, block, sharding.group);
    const DirectionBuffers own = codes ? rows_of(x, (*call.recipe)->x, piece, sharding.group)
                                       : values_alone(rows_of(call.x, piece, sharding.group));
    const at::Tensor y =
        product_of_piece(operands.product, own, {piece.length * sharding.group.size, call.x.sym_size(-1)});
    if (i == 0) agree_before(y);
    sums.start(y, sharding, piece);
  }
  const auto sizes = sizes_of_sum(sizes_with(call.x, 1, call.w.sym_size(0)), sharding);
  return sums.wait(sharding, sizes, call.dtype, call.bias);
}

/// The results of linear_fwd of this rank, of which there is only y where there were several products, and what is kept
/// of x.
std::pair<op::Tensors<7>, DirectionBuffers> multiply(const ParallelLinear::Args& call, const Exchange& exchange,
                                                     const Operands& operands, op::Needs need) {
  if (exchange.has_pieces()) {
    const auto absent = [&] { return call.x.new_empty({0}, at::kFloat); };
    op::Tensors<7> results;
    results[0] = exchange.x_arrives ? product_of_arrivals(call, operands) : sum_of_pieces(call, operands);
    const DirectionBuffers x = values_alone(need[kW] ? call.x : absent());
    results[3] = absent(), results[6] = absent();
    return {std::move(results), x};
  }
  if (operands.kept_x) need.bits &= ~(int64_t{1} << kW);
  auto found = GroupedLinear::product(operands.product, need);
  agree_before(found.first[0]);
  return found;
}

}  // namespace

op::Tensors<3> ParallelLinear::inference(const Args& a) { return forward(a, {}).first; }

std::pair<op::Tensors<3>, ParallelLinear::Saved> ParallelLinear::forward(const Args& call, op::Needs need) {
  std::string layer = take_next_caller();
  check(call, need);
  const Caller caller(layer);
  const Agreement agreement(layer, {.t = {call.x},
                                    .tokens = rows_of(call.x),
                                    .in_features = call.w.sym_size(1),
                                    .out_features = call.w.sym_size(0),
                                    .recipe = call.recipe,
                                    .parallel = call.parallel});
  const Exchange exchange = exchange_of(call);
  const Operands operands = operands_of(call, exchange, need);
  const auto [results, x] = multiply(call, exchange, operands, need);
  GroupedLinear::Args known = mode_of(call.recipe) == Backward::high_precision ? own_product(call) : operands.product;
  known.dtype = call.dtype;
  Saved kept{GroupedLinear::saved(known, operands.kept_x.value_or(x), results, need), call.part, call.parallel,
             std::move(layer), operands.keeps_x_itself};
  const at::Tensor y = exchange.y_in_pieces ? results[0] : whole_y(call, results[0]);
  at::Tensor x_amax = results[3], w_amax = results[6];
  if (call.fwd_scale) {
    const Parallel& sharding = **call.parallel;
    const int axis_of_x = exchange.x == WayOfX::gathered_values ? -1 : sharding.axis_of_x();
    x_amax = reduced(exchange.quantizes_x() ? operands.x_amax : x_amax, axis_of_x, sharding.group);
    if (call.w_buffers.empty())
      w_amax = reduced(exchange.quantizes_w ? operands.w_amax : w_amax, sharding.axis_of_w(), sharding.group);
  }
  return {{y, x_amax, w_amax}, std::move(kept)};
}

op::Tensors<11> ParallelLinear::backward(const Saved& s, const op::Tensors<3>& grads, op::Needs need) {
  const Caller caller(s.layer);
  auto [dx, dw, dbias] = parallel_gradients(s, grads[0], need);
  return {std::move(dx), std::move(dw), std::move(dbias), {}, {}, {}, {}, {}, {}, {}, {}};
}

}  // namespace quire_torch
