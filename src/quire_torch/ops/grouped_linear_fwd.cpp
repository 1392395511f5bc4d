#include "quire_torch/ops/grouped_linear_fwd.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

#include <deque>

#include "quire/gemm/gemm.h"
#include "quire/quantize/fingerprint.h"

namespace quire_torch {
namespace {

using quire::Direction;

/// Codes that are kept over steps are refused once their tensor has changed, however it was written.
void check_fresh(const GroupedLinearFwd::Args& a, const Groups& groups, const quire::Context& context) {
  if (!a.w_fingerprint) return;
  const at::Tensor& made = *a.w_fingerprint;
  quire::check(made.scalar_type() == at::kLong && made.numel() == static_cast<int64_t>(groups.size()) &&
                   made.is_contiguous() && !a.w.empty(),
               "grouped_linear: w_fingerprint must be what quire::fingerprint returned for each w, int64 of size [",
               groups.size(), "], and w be given; got ", made.scalar_type(), " ", made.sizes());
  for (size_t e = 0; e < groups.size(); ++e) {
    if (groups.rows(e) == 0) continue;
    const MatrixView w(member(a.w, e, 2), "grouped_linear: w");
    const int64_t* expected = made.const_data_ptr<int64_t>() + e;
    quire::fingerprint({.x = w.matrix(), .expected = expected, .what = "grouped_linear"}, context);
  }
}

/// The forward product without a recipe.
void plain(const GroupedLinearFwd::Args& a, const Groups& groups, at::Tensor& y) {
  const at::Tensor x = a.x.reshape({-1, a.x.size(-1)}).to(a.dtype), rows = y.view({-1, y.size(-1)});
  for (size_t e = 0; e < groups.size(); ++e) {
    if (groups.rows(e) == 0) continue;
    const at::Tensor from = x.narrow(0, groups.begin(e), groups.rows(e)), w = member(a.w, e, 2).to(a.dtype).t();
    at::Tensor part = rows.narrow(0, groups.begin(e), groups.rows(e));
    if (a.bias.empty())
      at::mm_out(part, from, w);
    else
      at::addmm_out(part, member(a.bias, e, 1).to(a.dtype), from, w);
  }
}

/// The direction that `save` asks to keep of an operand.
std::optional<Direction> saved(const GroupedLinearFwd::Args& a, int64_t bit) {
  if ((a.save & bit) == 0) return std::nullopt;
  return saved_direction(**a.recipe);
}

/// x as it is given, rowwise.
std::vector<quire::Side> given_x(const GroupedLinearFwd::Args& a, const Groups& groups, int64_t k) {
  quire::check(a.x_buffers.size() == 6 && a.x_buffers[0] && a.x_buffers[1],
               "grouped_linear: x_buffers must be six buffers, rowwise ones among them; got ", a.x_buffers.size());
  const std::array three{*a.x_buffers[0], *a.x_buffers[1], a.x_buffers[2].value_or(at::Tensor())};
  return grouped_sides(three, {(*a.recipe)->x, groups, k, Direction::rowwise}, "grouped_linear: x");
}

/// x of each group, rowwise; in the other direction too where that is saved.
GroupedCodes quantize_x(const GroupedLinearFwd::Args& a, const Groups& groups, op::Tensors<7>& out,
                        const quire::Context& context) {
  const MatrixView x(a.x, "grouped_linear: x");
  const auto count = static_cast<int64_t>(groups.size());
  const auto kept = saved(a, kSaveX);
  return quantize_groups(rows_of(x.matrix(), groups), groups, x.matrix().cols,
                         {.what = "grouped_linear: x",
                          .role = "x",
                          .spec = (*a.recipe)->x,
                          .rowwise = true,
                          .columnwise = kept == Direction::columnwise,
                          .scale = group_scales(a.fwd_scale, 3, count, 0, "grouped_linear: fwd_scale"),
                          .results = std::span(out).subspan(1, 3),
                          .kept = kept},
                         context);
}

/// w of each group; where neither backward nor delayed scaling want the others, of those that have tokens.
GroupedCodes quantize_w(const GroupedLinearFwd::Args& a, const Groups& groups, op::Tensors<7>& out,
                        const quire::Context& context) {
  const int64_t n = op::as<int64_t>(a.out_features), k = a.x.size(-1);
  const auto count = static_cast<int64_t>(groups.size());
  const auto kept = saved(a, kSaveW);
  std::vector<MatrixView> views;
  std::vector<quire::Matrix> matrices;
  for (size_t e = 0; e < groups.size(); ++e) {
    views.emplace_back(member(a.w, e, 2), "grouped_linear: w");
    matrices.push_back(views.back().matrix());
    if (groups.rows(e) == 0 && !kept && !a.fwd_scale) matrices.back().rows = 0;
  }
  return quantize_groups(matrices, Groups::equal(count, n), k,
                         {.what = "grouped_linear: w",
                          .role = "w",
                          .spec = (*a.recipe)->w,
                          .rowwise = true,
                          .columnwise = kept == Direction::columnwise,
                          .scale = group_scales(a.fwd_scale, 3, count, 1, "grouped_linear: fwd_scale"),
                          .results = std::span(out).subspan(4, 3),
                          .kept = kept},
                         context);
}

}  // namespace

at::Tensor member(const op::TensorList& list, size_t group, int64_t rank) {
  return list[0].dim() > rank ? list[0].select(0, static_cast<int64_t>(group)) : list[group];
}

void GroupedLinearFwd::run(const Args& a, op::Tensors<7>& out, const quire::Context& context) {
  const int64_t n = op::as<int64_t>(a.out_features), k = a.x.size(-1);
  const quire::MutableMatrix y = mutable_matrix(out[0]);
  const Groups groups(a.offsets, y.rows, "grouped_linear");
  zero_beyond(out[0], groups);
  if (!a.recipe->has_value()) return plain(a, groups, out[0]);
  check_fresh(a, groups, context);
  const quire::LinearSpec& recipe = **a.recipe;
  const Groups experts = Groups::equal(static_cast<int64_t>(groups.size()), n);
  const GroupedLayout x_layout{recipe.x, groups, k, Direction::rowwise},
      w_layout{recipe.w, experts, k, Direction::rowwise};
  GroupedCodes x, w;
  if (a.x_buffers.empty())
    x = quantize_x(a, groups, out, context);
  else
    x.rows = given_x(a, groups, k);
  if (a.w_buffers.empty())
    w = quantize_w(a, groups, out, context);
  else
    w.rows = given_sides(a.w_buffers, w_layout, n, "grouped_linear: w");
  std::deque<MatrixView> biases;
  std::vector<quire::GemmProblem> products;
  for (size_t e = 0; e < groups.size(); ++e) {
    if (groups.rows(e) == 0) continue;
    auto* rows = static_cast<char*>(y.data) + groups.begin(e) * n * size_of(y.dtype);
    quire::GemmProblem p{.a = grouped_operand(x.rows, x_layout, e),
                         .b = grouped_operand(w.rows, w_layout, e),
                         .out = {rows, y.dtype, groups.rows(e), n, n},
                         .role = quire::kFprop};
    if (!a.bias.empty()) {
      const quire::Matrix& bias = biases.emplace_back(member(a.bias, e, 1), "grouped_linear: bias").matrix();
      p.bias = bias.data, p.bias_dtype = bias.dtype;
    }
    products.push_back(p);
  }
  quire::gemm_each(products, context);
}

}  // namespace quire_torch
