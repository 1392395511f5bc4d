#include "quire_torch/ops/grouped_linear_bwd.h"

#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>

#include "quire/gemm/gemm.h"

namespace quire_torch {
namespace {

using quire::Direction;
using Sides = std::vector<quire::Side>;

/// dy of each group, in the directions that are needed.
GroupedCodes quantize_dy(const GroupedLinearBwd::Args& a, const Groups& groups, op::Tensors<6>& out,
                         const quire::Context& context) {
  const MatrixView dy(a.dy, "grouped_linear_bwd: dy");
  const auto count = static_cast<int64_t>(groups.size());
  return quantize_groups(rows_of(dy.matrix(), groups), groups, dy.matrix().cols,
                         {.what = "grouped_linear_bwd: dy",
                          .role = "dy",
                          .spec = a.recipe->dy,
                          .rowwise = (a.needs & kNeedsX) != 0,
                          .columnwise = (a.needs & (kNeedsW | kKeepsDy)) != 0,
                          .random = randomness(a.recipe->dy, a.sr_state),
                          .scale = group_scales(a.bwd_scale, 2, count, 0, "grouped_linear_bwd: bwd_scale"),
                          .results = std::span(out).subspan(3, 3),
                          .kept = a.needs & kKeepsDy ? std::optional(Direction::columnwise) : std::nullopt},
                         context);
}

void multiply_dx(const GroupedLinearBwd::Args& a, const Groups& groups, const Sides& dy, at::Tensor& dx,
                 const quire::Context& context) {
  const int64_t n = a.dy.size(-1), k = op::as<int64_t>(a.in_features);
  const Groups experts = Groups::equal(static_cast<int64_t>(groups.size()), n);
  const GroupedLayout dy_layout{a.recipe->dy, groups, n, Direction::rowwise},
      w_layout{a.recipe->w, experts, k, Direction::columnwise};
  const Sides w = given_sides(a.w_buffers, w_layout, n, "grouped_linear_bwd: w");
  zero_beyond(dx, groups);
  const quire::MutableMatrix m = mutable_matrix(dx);
  std::vector<quire::GemmProblem> products;
  for (size_t e = 0; e < groups.size(); ++e) {
    if (groups.rows(e) == 0) continue;
    auto* data = static_cast<char*>(m.data) + groups.begin(e) * k * size_of(m.dtype);
    products.push_back({.a = grouped_operand(dy, dy_layout, e),
                        .b = grouped_operand(w, w_layout, e),
                        .out = {data, m.dtype, groups.rows(e), k, k},
                        .role = quire::kDgrad});
  }
  quire::gemm_each(products, context);
}

/// Columnwise codes of a gradient's two operands.
struct WgradOperands {
  Sides dy, x;
  GroupedLayout dy_layout, x_layout;
};

/// dw of each group, written or added.
void multiply_dw(const WgradOperands& codes, const op::TensorList& dw, bool add, const quire::Context& context) {
  const Groups& groups = codes.dy_layout.groups;
  std::vector<quire::GemmProblem> products;
  for (size_t e = 0; e < groups.size(); ++e) {
    at::Tensor part = member(dw, e, 2);
    if (groups.rows(e) == 0) {
      if (!add) part.zero_();
      continue;
    }
    const quire::MutableMatrix out = mutable_matrix(part);
    products.push_back({.a = grouped_operand(codes.dy, codes.dy_layout, e),
                        .b = grouped_operand(codes.x, codes.x_layout, e),
                        .out = out,
                        .addend = add ? out.data : nullptr,
                        .role = quire::kWgrad});
  }
  quire::gemm_each(products, context);
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
  const Groups groups(a.offsets, quire::product(sizes, 0, sizes.size() - 1), "grouped_linear_bwd");
  if (a.needs & (kNeedsX | kNeedsW | kKeepsDy)) {
    const GroupedCodes dy = quantize_dy(a, groups, out, context);
    if (a.needs & kNeedsX) multiply_dx(a, groups, dy.rows, out[0], context);
    const GroupedLayout dy_layout{a.recipe->dy, groups, a.dy.size(-1), Direction::columnwise},
        x_layout{a.recipe->x, groups, op::as<int64_t>(a.in_features), Direction::columnwise};
    if (a.needs & kNeedsW)
      multiply_dw({dy.columns, grouped_sides(Three{a.x_data, a.x_scale, a.x_amax}, x_layout, "grouped_linear_bwd: x"),
                   dy_layout, x_layout},
                  {out[1]}, false, context);
  }
  if (!(a.needs & kNeedsBias)) return;
  const MatrixView dy(a.dy, "grouped_linear_bwd: dy");
  const auto parts = rows_of(dy.matrix(), groups);
  const quire::MutableMatrix dbias = mutable_matrix(out[2]);
  for (size_t e = 0; e < parts.size(); ++e)
    quire::column_sum(
        {.x = parts[e],
         .out = static_cast<char*>(dbias.data) + static_cast<int64_t>(e) * dbias.cols * size_of(dbias.dtype),
         .out_dtype = dbias.dtype},
        context);
}

void GroupedWgrad::run(const Args& a, const quire::Context& context) {
  const op::TensorList& dw = a.main_grad.value;
  const int64_t count = group_count(a.offsets, "grouped_wgrad_");
  check_count(dw, count, "grouped_wgrad_");
  const int64_t n = dw[0].size(-2), k = dw[0].size(-1);
  for (int64_t e = 0; e < count; ++e) {
    const at::Tensor one = member(dw, static_cast<size_t>(e), 2);
    check_main_grad(one, "grouped_wgrad_: main_grad");
    quire::check(one.size(0) == n && one.size(1) == k, "grouped_wgrad_: main_grad must have one shape in all groups, [",
                 n, ", ", k, "]; got ", one.sizes());
  }
  // Every row of x and dy that counts is in a group.
  const Groups groups(a.offsets, most_tokens(a.dy_data, a.x_data), "grouped_wgrad_");
  const GroupedLayout dy{a.recipe->dy, groups, n, Direction::columnwise},
      x{a.recipe->x, groups, k, Direction::columnwise};
  const Three dy_buffers{a.dy_data, a.dy_scale, a.dy_amax};
  multiply_dw({grouped_sides(dy_buffers, dy, "grouped_wgrad_: dy"),
               grouped_sides(Three{a.x_data, a.x_scale, a.x_amax}, x, "grouped_wgrad_: x"), dy, x},
              dw, !a.overwrite, context);
}

void GroupedAccumulate::run(const Args& a, const quire::Context& context) {
  quire::check(a.value.dim() == 3, "grouped_accumulate_: value must be [groups, N, K], got ", a.value.sizes());
  check_count(a.main_grad.value, a.value.size(0), "grouped_accumulate_");
  const auto part = [&](int64_t e) { return member(a.main_grad.value, static_cast<size_t>(e), 2); };
  for (int64_t e = 0; e < a.value.size(0); ++e) check_addend(part(e), a.value.select(0, e), "grouped_accumulate_");
  for (int64_t e = 0; e < a.value.size(0); ++e)
    Accumulate::run({{part(e)}, a.value.select(0, e), a.overwrite}, context);
}

namespace {

/// w of each group as a matrix that is multiplied: as it came, or the values of its codes.
class PlainWeights {
 public:
  PlainWeights(const GroupedPlainBwd::Args& a, int64_t groups, const quire::Context& context)
      : a_(a),
        context_(context),
        n_(a.dy.size(-1)),
        k_(op::as<int64_t>(a.in_features)),
        experts_(Groups::equal(groups, n_)) {
    if (a.w.empty() && (a.needs & kNeedsX)) sides_ = given_sides(a.w_buffers, layout(), n_, "grouped_plain_bwd: w");
  }

  at::Tensor operator[](size_t group) const {
    if (!a_.w.empty()) return member(a_.w, group, 2).to(a_.dtype);
    at::Tensor values = op::allocate(at::IntArrayRef({n_, k_}), a_.dy.options().dtype(a_.dtype));
    decode_group({sides_, layout(), group}, mutable_matrix(values), context_);
    return values;
  }

 private:
  GroupedLayout layout() const { return {(*a_.recipe)->w, experts_, k_, Direction::rowwise}; }

  const GroupedPlainBwd::Args& a_;
  const quire::Context& context_;
  int64_t n_, k_;
  Groups experts_;
  Sides sides_;
};

}  // namespace

void GroupedPlainBwd::run(const Args& a, op::Tensors<3>& out, const quire::Context& context) {
  const at::Tensor dy = a.dy.reshape({-1, a.dy.size(-1)}), g = dy.to(a.dtype);
  const Groups groups(a.offsets, dy.size(0), "grouped_plain_bwd");
  const PlainWeights w(a, static_cast<int64_t>(groups.size()), context);
  at::Tensor x;
  if (a.needs & kNeedsW) {
    x = a.x.reshape({-1, op::as<int64_t>(a.in_features)});
    quire::check(x.size(0) == dy.size(0), "grouped_plain_bwd: x and dy must agree on rows; got ", x.size(0), " and ",
                 dy.size(0));
  }
  if (a.needs & kNeedsX) zero_beyond(out[0], groups);
  for (size_t e = 0; e < groups.size(); ++e) {
    const auto part = [&](const at::Tensor& t) { return t.narrow(0, groups.begin(e), groups.rows(e)); };
    const auto row = static_cast<int64_t>(e);
    if ((a.needs & kNeedsX) && groups.rows(e) > 0)
      part(out[0].view({-1, out[0].size(-1)})).copy_(at::mm(part(g), w[e]));
    if (a.needs & kNeedsW) out[1].select(0, row).copy_(at::mm(part(g).t(), part(x).to(a.dtype)));
    if (a.needs & kNeedsBias) out[2].select(0, row).copy_(at::sum(part(dy), {0}));
  }
}

}  // namespace quire_torch
