#include "quire_torch/ops/linear_bwd.h"

#include "quire/operations/operations.h"
#include "quire_torch/ops/state.h"

namespace quire_torch {
namespace {

using quire::Direction;

/// Where dy's rounding takes its bits in the backward pass that sr_state stands at when the kernel runs; none for a
/// spec that rounds to nearest. Throws where sr_state is absent or wrong.
quire::Randomness randomness(const LinearBwd::Args& a) {
  if (!a.recipe->dy.stochastic) return {};
  if (!a.sr_state)
    quire::fail("linear_bwd: dy rounds stochastically under '", a.recipe->dy.to_string(),
                "' and needs sr_state, an int64 [2] tensor {seed, counter}; got none");
  check_sr_state(*a.sr_state);
  quire::check(!a.part || (a.part->scalar_type() == at::kLong && a.part->dim() == 1 && a.part->numel() >= 2 &&
                           a.part->is_contiguous()),
               "linear_bwd: part must be a contiguous int64 [2 + cuts] tensor {index, count, cuts}, got ",
               a.part ? a.part->sizes() : at::IntArrayRef());
  return {.columnwise_offset = 1,
          .state = a.sr_state->const_data_ptr<int64_t>(),
          .part = a.part ? a.part->const_data_ptr<int64_t>() : nullptr,
          .axis = 1,
          .cuts = a.part ? a.part->numel() - 2 : 0};
}

/// Amaxes that a caller gave; null if there are none.
const float* given_amax(const LinearBwd::Args& a, const quire::GroupSizes<int64_t>& sizes) {
  if (!a.given_amax) return nullptr;
  const bool rowwise = (a.needs & kNeedsX) != 0, columnwise = (a.needs & (kNeedsW | kKeepsDy)) != 0;
  const int64_t count =
      quire::grouped_amax_count(a.recipe->dy, sizes, rowwise ? Direction::rowwise : Direction::columnwise);
  quire::check(rowwise != columnwise && a.given_amax->scalar_type() == at::kFloat && a.given_amax->numel() == count &&
                   a.given_amax->is_contiguous(),
               "linear_bwd: given_amax must be contiguous float32 [", count,
               "] of the one direction of dy that needs=", a.needs, " asks for, 1 or one of 2 and 8; got ",
               a.given_amax->scalar_type(), " ", a.given_amax->sizes());
  return a.given_amax->const_data_ptr<float>();
}

/// dy of each group, in the directions that are needed.
GroupedCodes quantize_dy(const LinearBwd::Args& a, const GroupsView& groups, op::Tensors<6>& out,
                         const quire::Context& context) {
  const MatrixView dy(a.dy, "linear_bwd: dy");
  return {dy.matrix(),
          {},
          groups,
          {.what = "linear_bwd: dy",
           .role = "dy",
           .device = a.dy.device(),
           .spec = a.recipe->dy,
           .rowwise = (a.needs & kNeedsX) != 0,
           .columnwise = (a.needs & (kNeedsW | kKeepsDy)) != 0,
           .random = randomness(a),
           .scale = group_scales(a.bwd_scale, 2, groups.count(), 0, "linear_bwd: bwd_scale"),
           .amax = given_amax(a, {dy.matrix().rows, dy.matrix().cols, groups.count()}),
           .results = std::span(out).subspan(3, 3),
           .kept = a.needs & kKeepsDy ? std::optional(Direction::columnwise) : std::nullopt},
          context};
}

/// The sum of dy over the rows of each group.
void sum_dy(const at::Tensor& t, const quire::RowGroups& groups, at::Tensor& dbias, const quire::Context& context) {
  const MatrixView dy(t, "linear_bwd: dy");
  const quire::MutableMatrix out = mutable_matrix(dbias);
  quire::column_sum({.x = dy.matrix(), .out = out.data, .out_dtype = out.dtype, .groups = groups}, context);
}

/// Throws if `needs` has another bit than these.
void check_needs(int64_t needs, const char* op) {
  constexpr int64_t kAll = kNeedsX | kNeedsW | kNeedsBias | kKeepsDy;
  quire::check((needs & ~kAll) == 0, op, ": needs must be a sum of 1 (dx), 2 (dw), 4 (dbias) and 8 (dy), got ", needs);
}

/// A gradient among the results of a backward operator; absent where it is not needed.
template <class Int>
op::Result<Int> needed(int64_t wanted, c10::ArrayRef<Int> sizes, at::ScalarType dtype) {
  if (wanted == 0) return op::absent<Int>(dtype);
  op::Result<Int> r{{}, dtype};
  r.sizes.append(sizes.begin(), sizes.end());
  return r;
}

/// dx, dw and dbias of a backward operator, as `needs` says; op: its name, for errors.
template <class Int, class Args>
std::array<op::Result<Int>, 3> gradient_results(const Args& a, const char* op) {
  check_result_dtype(a.dtype, op, ": dtype");
  auto dx = shape<Int>(a.dy);
  const std::array<Int, 3> of_groups{Int(group_count(a.offsets, a.dy, op)), dx.back(), op::as<Int>(a.in_features)};
  const auto dw = c10::ArrayRef<Int>(of_groups).slice(a.offsets ? 0 : 1), dbias = dw.slice(0, dw.size() - 1);
  dx.back() = dw.back();
  return {needed<Int>(a.needs & kNeedsX, {dx.data(), dx.size()}, a.dtype), needed<Int>(a.needs & kNeedsW, dw, a.dtype),
          needed<Int>(a.needs & kNeedsBias, dbias, a.dy.scalar_type())};
}

}  // namespace

template <class Int>
std::array<op::Result<Int>, 6> LinearBwd::results(const Args& a) {
  check_input(a.dy, "linear_bwd: dy");
  check_needs(a.needs, "linear_bwd");
  const auto [dx, dw, dbias] = gradient_results<Int>(a, "linear_bwd");
  const auto dy = shape<Int>(a.dy);
  const int64_t groups = group_count(a.offsets, a.dy, "linear_bwd");
  auto q = rows_results<Int>(a.recipe->dy, {quire::product(dy, 0, dy.size() - 1), dy.back(), groups},
                             a.offsets.has_value(), quire::Direction::columnwise, (a.needs & kKeepsDy) != 0);
  if (a.bwd_scale && (a.needs & (kNeedsX | kNeedsW | kKeepsDy))) q[2] = {{Int(groups)}, at::kFloat};
  return {dx, dw, dbias, q[0], q[1], q[2]};
}
template std::array<op::Result<int64_t>, 6> LinearBwd::results<int64_t>(const Args&);
template std::array<op::Result<c10::SymInt>, 6> LinearBwd::results<c10::SymInt>(const Args&);

// Operands that are given come first: a refusal leaves nothing half done.
void LinearBwd::run(const Args& a, op::Tensors<6>& out, const quire::Context& context) {
  const auto sizes = shape<int64_t>(a.dy);
  const int64_t n = sizes.back(), k = op::as<int64_t>(a.in_features);
  const GroupsView groups(a.offsets, quire::product(sizes, 0, sizes.size() - 1), "linear_bwd");
  if (a.needs & (kNeedsX | kNeedsW | kKeepsDy)) {
    std::optional<GivenOperand> w, x;
    if (a.needs & kNeedsX)
      w.emplace(a.w_buffers, GivenGroups::matrices(a.recipe->w, Direction::columnwise, groups.count(), {n, k}),
                "linear_bwd: w");
    if (a.needs & kNeedsW)
      x.emplace(std::array{a.x_data, a.x_scale, a.x_amax}, GivenGroups{a.recipe->x, Direction::columnwise, groups, k},
                "linear_bwd: x");
    const GroupedCodes dy = quantize_dy(a, groups, out, context);
    const auto multiply = [&](Direction of_dy, const GivenOperand& b, at::Tensor& to, const quire::GemmRole& role) {
      quire::gemm({.a = dy.operand(of_dy), .b = b, .out = mutable_matrix(to), .role = role}, context);
    };
    if (w) multiply(Direction::rowwise, *w, out[0], quire::kDgrad);
    if (x) multiply(Direction::columnwise, *x, out[1], quire::kWgrad);
  }
  if (a.needs & kNeedsBias) sum_dy(a.dy, groups, out[2], context);
}

template <class Int>
std::array<op::Result<Int>, 3> LinearUnquantizedBwd::results(const Args& a) {
  check_input(a.dy, "linear_unquantized_bwd: dy");
  check_needs(a.needs, "linear_unquantized_bwd");
  quire::check((a.needs & kKeepsDy) == 0, "linear_unquantized_bwd: needs must not have 8: no dy is quantized; got ",
               a.needs);
  const auto gradients = gradient_results<Int>(a, "linear_unquantized_bwd");
  if ((a.needs & kNeedsX) && a.w.empty())
    quire::check(a.recipe->has_value(), "linear_unquantized_bwd: w is absent; pass it, or its codes and a recipe");
  else if (a.needs & kNeedsX)
    check_list<Int>(a.w, group_count(a.offsets, a.dy, "linear_unquantized_bwd"),
                    {op::size<Int>(a.dy, -1), op::as<Int>(a.in_features)}, "linear_unquantized_bwd: w", a.dy.device());
  return gradients;
}
template std::array<op::Result<int64_t>, 3> LinearUnquantizedBwd::results<int64_t>(const Args&);
template std::array<op::Result<c10::SymInt>, 3> LinearUnquantizedBwd::results<c10::SymInt>(const Args&);

void LinearUnquantizedBwd::run(const Args& a, op::Tensors<3>& out, const quire::Context& context) {
  const MatrixView dy(a.dy, "linear_unquantized_bwd: dy");
  const int64_t n = dy.matrix().cols, k = op::as<int64_t>(a.in_features);
  const GroupsView groups(a.offsets, dy.matrix().rows, "linear_unquantized_bwd");
  std::optional<MatrixView> x;
  if (a.needs & kNeedsW) {
    x.emplace(a.x, "linear_unquantized_bwd: x");
    quire::check(x->matrix().rows == dy.matrix().rows && x->matrix().cols == k,
                 "linear_unquantized_bwd: x must have dy's rows and in_features columns, [", dy.matrix().rows, ", ", k,
                 "]; got [", x->matrix().rows, ", ", x->matrix().cols, "]");
  }
  if (a.needs & kNeedsX) {
    quire::MatmulProblem dx{.a = dy.matrix(), .b = {}, .out = mutable_matrix(out[0]), .groups = groups};
    if (a.w.empty()) {
      const GivenOperand w(a.w_buffers,
                           GivenGroups::matrices((*a.recipe)->w, Direction::rowwise, groups.count(), {n, k}),
                           "linear_unquantized_bwd: w");
      dx.codes = w;
      quire::matmul(dx, context);
    } else {
      const GroupMatrices w(a.w, groups.count(), "linear_unquantized_bwd: w");
      dx.b = w.all(), dx.bs = w.each();
      quire::matmul(dx, context);
    }
  }
  if (x)
    quire::matmul(
        {.a = dy.matrix(), .b = x->matrix(), .transpose_a = true, .out = mutable_matrix(out[1]), .groups = groups},
        context);
  if (a.needs & kNeedsBias) sum_dy(a.dy, groups, out[2], context);
}

}  // namespace quire_torch
