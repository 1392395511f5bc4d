#include "quire_torch/ops/grouped_linear_fwd.h"

#include "quire/gemm/gemm.h"
#include "quire/quantize/fingerprint.h"

namespace quire_torch {
namespace {

using quire::Direction;

/// Codes that are kept over steps are refused once their tensor has changed, however it was written.
void check_fresh(const GroupedLinearFwd::Args& a, const GroupsView& groups, const quire::Context& context) {
  if (!a.w_fingerprint) return;
  const at::Tensor& made = *a.w_fingerprint;
  quire::check(
      made.scalar_type() == at::kLong && made.numel() == groups.count() && made.is_contiguous() && !a.w.empty(),
      "grouped_linear: w_fingerprint must be what quire::fingerprint returned for each w, int64 of size [",
      groups.count(), "], and w be given; got ", made.scalar_type(), " ", made.sizes());
  const MatrixList w(a.w, groups.count(), "grouped_linear: w");
  quire::grouped_fingerprint(
      {.x = w, .groups = groups, .expected = made.const_data_ptr<int64_t>(), .what = "grouped_linear"}, context);
}

/// The forward product without a recipe.
void plain(const GroupedLinearFwd::Args& a, const GroupsView& groups, const quire::MutableMatrix& y,
           const quire::Context& context) {
  const MatrixView x(a.x, "grouped_linear: x");
  const MatrixList w(a.w, groups.count(), "grouped_linear: w");
  const BiasList bias(a.bias, groups.count(), "grouped_linear: bias");
  quire::grouped_matmul({.groups = groups,
                         .a = {.rows = x.matrix()},
                         .b = {.each = w},
                         .transpose_b = true,
                         .bias = bias,
                         .out = {.rows = y}},
                        context);
}

/// The direction that `save` asks to keep of an operand.
std::optional<Direction> saved(const GroupedLinearFwd::Args& a, int64_t bit) {
  if ((a.save & bit) == 0) return std::nullopt;
  return saved_direction(**a.recipe);
}

/// x as it is given, rowwise.
quire::GroupedOperand given_x(const GroupedLinearFwd::Args& a, const GroupsView& groups, int64_t k) {
  quire::check(a.x_buffers.size() == 6 && a.x_buffers[0] && a.x_buffers[1],
               "grouped_linear: x_buffers must be six buffers, rowwise ones among them; got ", a.x_buffers.size());
  const std::array three{*a.x_buffers[0], *a.x_buffers[1], a.x_buffers[2].value_or(at::Tensor())};
  const quire::QuantSpec& spec = (*a.recipe)->x;
  return {.spec = spec,
          .direction = Direction::rowwise,
          .groups = groups,
          .cols = k,
          .side = flat_side(three, spec, Direction::rowwise, "grouped_linear: x"),
          .what = "grouped_linear: x"};
}

/// x of each group, rowwise; in the other direction too where that is saved.
GroupedCodes quantize_x(const GroupedLinearFwd::Args& a, const GroupsView& groups, op::Tensors<7>& out,
                        const quire::Context& context) {
  const MatrixView x(a.x, "grouped_linear: x");
  const auto kept = saved(a, kSaveX);
  return {{.rows = x.matrix()},
          groups,
          x.matrix().cols,
          {.what = "grouped_linear: x",
           .role = "x",
           .spec = (*a.recipe)->x,
           .rowwise = true,
           .columnwise = kept == Direction::columnwise,
           .scale = group_scales(a.fwd_scale, 3, groups.count(), 0, "grouped_linear: fwd_scale"),
           .results = std::span(out).subspan(1, 3),
           .kept = kept},
          context};
}

/// w of each group; where neither backward nor delayed scaling want the others, of those that have tokens.
GroupedCodes quantize_w(const GroupedLinearFwd::Args& a, const GroupsView& groups, op::Tensors<7>& out,
                        const quire::Context& context) {
  const auto kept = saved(a, kSaveW);
  const MatrixList w(a.w, groups.count(), "grouped_linear: w");
  return {{.each = w},
          quire::RowGroups::equal(groups.count(), op::as<int64_t>(a.out_features)),
          a.x.size(-1),
          {.what = "grouped_linear: w",
           .role = "w",
           .spec = (*a.recipe)->w,
           .rowwise = true,
           .columnwise = kept == Direction::columnwise,
           .scale = group_scales(a.fwd_scale, 3, groups.count(), 1, "grouped_linear: fwd_scale"),
           .results = std::span(out).subspan(4, 3),
           .kept = kept,
           .only = kept || a.fwd_scale ? quire::RowGroups{} : quire::RowGroups(groups)},
          context};
}

}  // namespace

void GroupedLinearFwd::run(const Args& a, op::Tensors<7>& out, const quire::Context& context) {
  const int64_t n = op::as<int64_t>(a.out_features), k = a.x.size(-1);
  const quire::MutableMatrix y = mutable_matrix(out[0]);
  const GroupsView groups(a.offsets, y.rows, "grouped_linear");
  if (!a.recipe->has_value()) return plain(a, groups, y, context);
  check_fresh(a, groups, context);
  std::optional<GroupedCodes> x, w;
  std::optional<GivenOperand> given_w;
  if (a.x_buffers.empty()) x.emplace(quantize_x(a, groups, out, context));
  if (a.w_buffers.empty())
    w.emplace(quantize_w(a, groups, out, context));
  else
    given_w.emplace(a.w_buffers, GivenGroups{(*a.recipe)->w, Direction::rowwise, groups.count(), n, k},
                    "grouped_linear: w");
  const BiasList bias(a.bias, groups.count(), "grouped_linear: bias");
  quire::grouped_gemm({.a = x ? x->operand(Direction::rowwise) : given_x(a, groups, k),
                       .b = w ? w->operand(Direction::rowwise) : quire::GroupedOperand(*given_w),
                       .out = {.rows = y},
                       .bias = bias,
                       .role = quire::kFprop},
                      context);
}

}  // namespace quire_torch
