#include "quire_torch/ops/grouped_linear_bwd.h"

#include "quire/gemm/gemm.h"

namespace quire_torch {
namespace {

using quire::Direction;

/// dy of each group, in the directions that are needed.
GroupedCodes quantize_dy(const GroupedLinearBwd::Args& a, const GroupsView& groups, op::Tensors<6>& out,
                         const quire::Context& context) {
  const MatrixView dy(a.dy, "grouped_linear_bwd: dy");
  return {{.rows = dy.matrix()},
          groups,
          dy.matrix().cols,
          {.what = "grouped_linear_bwd: dy",
           .role = "dy",
           .spec = a.recipe->dy,
           .rowwise = (a.needs & kNeedsX) != 0,
           .columnwise = (a.needs & (kNeedsW | kKeepsDy)) != 0,
           .random = randomness(a.recipe->dy, a.sr_state),
           .scale = group_scales(a.bwd_scale, 2, groups.count(), 0, "grouped_linear_bwd: bwd_scale"),
           .results = std::span(out).subspan(3, 3),
           .kept = a.needs & kKeepsDy ? std::optional(Direction::columnwise) : std::nullopt},
          context};
}

/// Columnwise codes of x or dy.
quire::GroupedOperand kept_operand(const Three& three, const quire::QuantSpec& spec, const quire::RowGroups& groups,
                                   int64_t cols, const char* what) {
  return {.spec = spec,
          .direction = Direction::columnwise,
          .groups = groups,
          .cols = cols,
          .side = flat_side(three, spec, Direction::columnwise, what),
          .what = what};
}

/// The sum of dy over the rows of each group.
void sum_dy(const at::Tensor& t, const quire::RowGroups& groups, at::Tensor& dbias, const quire::Context& context) {
  const MatrixView dy(t, "grouped_linear_bwd: dy");
  quire::grouped_column_sum({.x = dy.matrix(), .groups = groups, .out = mutable_matrix(dbias)}, context);
}

/// Throws unless main_grad has something for each group.
void check_count(const op::TensorList& main_grad, int64_t groups, const char* op) {
  const bool stacked = main_grad.size() == 1 && main_grad[0].dim() == 3 && main_grad[0].size(0) == groups;
  quire::check(stacked || static_cast<int64_t>(main_grad.size()) == groups, op,
               ": main_grad must be a matrix for each of the ", groups, " groups, or one tensor for all of them; got ",
               main_grad.size());
}

}  // namespace

void GroupedLinearBwd::run(const Args& a, op::Tensors<6>& out, const quire::Context& context) {
  const auto sizes = shape<int64_t>(a.dy);
  const int64_t n = sizes.back(), k = op::as<int64_t>(a.in_features);
  const GroupsView groups(a.offsets, quire::product(sizes, 0, sizes.size() - 1), "grouped_linear_bwd");
  if (a.needs & (kNeedsX | kNeedsW | kKeepsDy)) {
    // Given operands first: a refusal leaves nothing half done.
    std::optional<GivenOperand> w;
    std::optional<quire::GroupedOperand> x;
    if (a.needs & kNeedsX)
      w.emplace(a.w_buffers, GivenGroups{a.recipe->w, Direction::columnwise, groups.count(), n, k},
                "grouped_linear_bwd: w");
    if (a.needs & kNeedsW)
      x = kept_operand({a.x_data, a.x_scale, a.x_amax}, a.recipe->x, groups, k, "grouped_linear_bwd: x");
    const GroupedCodes dy = quantize_dy(a, groups, out, context);
    if (w)
      quire::grouped_gemm({.a = dy.operand(Direction::rowwise),
                           .b = *w,
                           .out = {.rows = mutable_matrix(out[0])},
                           .role = quire::kDgrad},
                          context);
    const auto dw = mutable_matrices({out[1]}, x ? groups.count() : 0);
    if (x)
      quire::grouped_gemm({.a = dy.operand(Direction::columnwise), .b = *x, .out = {.each = dw}, .role = quire::kWgrad},
                          context);
  }
  if (a.needs & kNeedsBias) sum_dy(a.dy, groups, out[2], context);
}

void GroupedWgrad::run(const Args& a, const quire::Context& context) {
  const op::TensorList& dw = a.main_grad.value;
  const int64_t count = group_count(a.offsets, a.dy_data, "grouped_wgrad_");
  check_count(dw, count, "grouped_wgrad_");
  const int64_t n = dw[0].size(-2), k = dw[0].size(-1);
  for (int64_t e = 0; e < count; ++e) {
    const at::Tensor one = member(dw, static_cast<size_t>(e), 2);
    check_main_grad(one, "grouped_wgrad_: main_grad");
    quire::check(one.size(0) == n && one.size(1) == k, "grouped_wgrad_: main_grad must have one shape in all groups, [",
                 n, ", ", k, "]; got ", one.sizes());
  }
  // Every row of x and dy that counts is in a group.
  const GroupsView groups(a.offsets, most_tokens(a.dy_data, a.x_data), "grouped_wgrad_");
  const auto out = mutable_matrices(dw, count);
  quire::grouped_gemm(
      {.a = kept_operand({a.dy_data, a.dy_scale, a.dy_amax}, a.recipe->dy, groups, n, "grouped_wgrad_: dy"),
       .b = kept_operand({a.x_data, a.x_scale, a.x_amax}, a.recipe->x, groups, k, "grouped_wgrad_: x"),
       .out = {.each = out},
       .accumulate = !a.overwrite,
       .role = quire::kWgrad},
      context);
}

void GroupedAccumulate::run(const Args& a, const quire::Context& context) {
  quire::check(a.value.dim() == 3, "grouped_accumulate_: value must be [groups, N, K], got ", a.value.sizes());
  check_count(a.main_grad.value, a.value.size(0), "grouped_accumulate_");
  const auto part = [&](int64_t e) { return member(a.main_grad.value, static_cast<size_t>(e), 2); };
  for (int64_t e = 0; e < a.value.size(0); ++e) check_addend(part(e), a.value.select(0, e), "grouped_accumulate_");
  for (int64_t e = 0; e < a.value.size(0); ++e)
    Accumulate::run({{part(e)}, a.value.select(0, e), a.overwrite}, context);
}

void GroupedPlainBwd::run(const Args& a, op::Tensors<3>& out, const quire::Context& context) {
  const MatrixView dy(a.dy, "grouped_plain_bwd: dy");
  const int64_t n = dy.matrix().cols, k = op::as<int64_t>(a.in_features);
  const GroupsView groups(a.offsets, dy.matrix().rows, "grouped_plain_bwd");
  std::optional<MatrixView> x;
  if (a.needs & kNeedsW) {
    const at::Tensor rows = a.x.reshape({-1, k});
    quire::check(rows.size(0) == dy.matrix().rows, "grouped_plain_bwd: x and dy must agree on rows; got ", rows.size(0),
                 " and ", dy.matrix().rows);
    x.emplace(rows, "grouped_plain_bwd: x");
  }
  if (a.needs & kNeedsX) {
    quire::GroupedMatmulProblem dx{
        .groups = groups, .a = {.rows = dy.matrix()}, .b = {}, .out = {.rows = mutable_matrix(out[0])}};
    if (a.w.empty()) {
      const GivenOperand w(a.w_buffers, {(*a.recipe)->w, Direction::rowwise, groups.count(), n, k},
                           "grouped_plain_bwd: w");
      dx.codes = w;
      quire::grouped_matmul(dx, context);
    } else {
      const MatrixList w(a.w, groups.count(), "grouped_plain_bwd: w");
      dx.b.each = w;
      quire::grouped_matmul(dx, context);
    }
  }
  const auto dw = mutable_matrices({out[1]}, x ? groups.count() : 0);
  if (x)
    quire::grouped_matmul({.groups = groups,
                           .a = {.rows = dy.matrix()},
                           .b = {.rows = x->matrix()},
                           .transpose_a = true,
                           .out = {.each = dw}},
                          context);
  if (a.needs & kNeedsBias) sum_dy(a.dy, groups, out[2], context);
}

}  // namespace quire_torch
