#include "quire_torch/ops/linear_fwd.h"

#include "quire/operations/operations.h"

namespace quire_torch {
namespace {

using quire::Direction;

/// Codes that are kept over steps are refused once their tensor has changed, however it was written.
void check_fresh(const LinearFwd::Args& a, const GroupsView& groups, const quire::Context& context) {
  if (!a.w_fingerprint) return;
  const at::Tensor& made = *a.w_fingerprint;
  quire::check(
      made.scalar_type() == at::kLong && made.numel() == groups.count() && made.is_contiguous() && !a.w.empty(),
      "linear: w_fingerprint must be what quire::fingerprint returned for each w, int64 of size [", groups.count(),
      "], and w be given; got ", made.scalar_type(), " ", made.sizes());
  if (!a.offsets && groups.rows() == 0) return;  // w is not read either
  const GroupMatrices w(a.w, groups.count(), "linear: w");
  quire::fingerprint({.x = w.all(),
                      .expected = made.const_data_ptr<int64_t>(),
                      .what = "linear",
                      .groups = {.count = groups.count(), .rows = w.all().rows},
                      .each = w.each(),
                      .only = groups},
                     context);
}

/// The forward product without a recipe.
void plain(const LinearFwd::Args& a, const GroupsView& groups, const quire::MutableMatrix& y,
           const quire::Context& context) {
  const MatrixView x(a.x, "linear: x");
  const GroupMatrices w(a.w, groups.count(), "linear: w");
  const GroupBiases bias(a.bias, groups.count(), "linear: bias");
  quire::matmul({.a = x.matrix(),
                 .b = w.all(),
                 .transpose_b = true,
                 .bias = bias.all(),
                 .out = y,
                 .groups = groups,
                 .bs = w.each(),
                 .biases = bias.each()},
                context);
}

/// The product of x itself and of decoded codes of w.
void weight_only(const LinearFwd::Args& a, const GroupsView& groups, const quire::Operand& codes,
                 const quire::MutableMatrix& y, const quire::Context& context) {
  const MatrixView x(a.x, "linear: x");
  const GroupBiases bias(a.bias, groups.count(), "linear: bias");
  quire::matmul({.a = x.matrix(),
                 .b = {},
                 .transpose_b = true,
                 .bias = bias.all(),
                 .out = y,
                 .groups = groups,
                 .codes = codes,
                 .biases = bias.each()},
                context);
}

/// The direction that `save` asks to keep of an operand.
std::optional<Direction> saved(const LinearFwd::Args& a, int64_t bit) {
  if ((a.save & bit) == 0) return std::nullopt;
  return saved_direction(**a.recipe);
}

/// x of each group, rowwise; in the other direction too where that is saved.
GroupedCodes quantize_x(const LinearFwd::Args& a, const GroupsView& groups, op::Tensors<7>& out,
                        const quire::Context& context) {
  const MatrixView x(a.x, "linear: x");
  const auto kept = saved(a, kSaveX);
  return {x.matrix(),
          {},
          groups,
          {.what = "linear: x",
           .role = "x",
           .device = a.x.device(),
           .spec = (*a.recipe)->x,
           .rowwise = true,
           .columnwise = kept == Direction::columnwise,
           .scale = group_scales(a.fwd_scale, 3, groups.count(), 0, "linear: fwd_scale"),
           .results = std::span(out).subspan(1, 3),
           .kept = kept},
          context};
}

/// w of each group; where neither backward nor delayed scaling want the others, of those that have tokens.
GroupedCodes quantize_w(const LinearFwd::Args& a, const GroupsView& groups, op::Tensors<7>& out,
                        const quire::Context& context) {
  const auto kept = saved(a, kSaveW);
  const GroupMatrices w(a.w, groups.count(), "linear: w");
  return {w.all(),
          w.each(),
          quire::RowGroups::equal(groups.count(), op::as<int64_t>(a.out_features)),
          {.what = "linear: w",
           .role = "w",
           .device = a.x.device(),
           .spec = (*a.recipe)->w,
           .rowwise = true,
           .columnwise = kept == Direction::columnwise,
           .scale = group_scales(a.fwd_scale, 3, groups.count(), 1, "linear: fwd_scale"),
           .results = std::span(out).subspan(4, 3),
           .kept = kept,
           .only = kept || a.fwd_scale ? quire::RowGroups{} : quire::RowGroups(groups)},
          context};
}

/// k: the columns of x.
template <class Int>
void check_arguments(const LinearFwd::Args& a, int64_t groups, const Int& k) {
  const Int n = op::as<Int>(a.out_features);
  quire::check(a.save >= 0 && a.save <= (kSaveX | kSaveW), "linear_fwd: save must be a sum of ", kSaveX, " for x and ",
               kSaveW, " for w, got ", a.save);
  quire::check(a.recipe->has_value() || !a.fwd_scale,
               "linear: fwd_scale is given, and recipe '' quantizes nothing; give a recipe, or no scale");
  quire::check(a.recipe->has_value() || (a.w_buffers.empty() && a.x_buffers.empty()),
               "linear: an operand is given quantized, and recipe '' multiplies x and w themselves; "
               "dequantize it, or give a recipe");
  const bool weight_only = a.recipe->has_value() && (*a.recipe)->weight_only;
  quire::check(!weight_only || a.x_buffers.empty(),
               "linear: x is given quantized, and a recipe with x=none multiplies x itself; dequantize it");
  quire::check(!weight_only || !a.fwd_scale,
               "linear: delayed scaling needs a spec for x, and the recipe has x=none; give x and dy specs");
  quire::check(!a.w.empty() || !a.w_buffers.empty(), "linear: w is absent; pass it or w_buffers");
  if (!a.w.empty()) check_list<Int>(a.w, groups, {n, k}, "linear: w", a.x.device());
  if (!a.bias.empty()) check_list<Int>(a.bias, groups, {n}, "linear: bias", a.x.device());
  const auto buffers = static_cast<int64_t>(a.w_buffers.size());
  quire::check(buffers == 0 || buffers == 6 || buffers == 6 * groups,
               "linear: w_buffers must be the six of quire.TensorProto for each of ", groups,
               " groups, or six flat ones of all; got ", buffers);
  check_result_dtype(a.dtype, "linear: dtype");
}

}  // namespace

void check_k(const at::Tensor& x, const at::Tensor& w) {
  quire::check(x.sym_size(-1) == w.sym_size(-1), "linear: x and w must agree on K; got x [..., ", x.sym_size(-1),
               "] and w ", w.sym_sizes(), "; the last dimension of x must be in_features, ", w.sym_size(-1));
}

void check_agreement(const at::Tensor& x, const at::Tensor& w) {
  check_input(x, "linear: x");
  check_input(w, "linear: w");
  quire::check(w.dim() == 2, "linear: w must be [out_features, in_features], got ", w.dim(), " dimensions");
  check_one_device(w.device(), x.device(), "linear: w and x");
  check_k(x, w);
}

template <class Int>
void check_list(const op::TensorList& list, int64_t groups, c10::ArrayRef<Int> each, const char* what,
                at::Device device) {
  const bool stacked = list.size() == 1 && list[0].dim() == static_cast<int64_t>(each.size()) + 1;
  quire::check(stacked || static_cast<int64_t>(list.size()) == groups, what, " must be one tensor for each of the ",
               groups, " groups of rows, or one with a leading dimension of groups; got ", list.size());
  quire::Shape<Int> wanted;
  if (stacked) wanted.push_back(Int(groups));
  for (const Int& size : each) wanted.push_back(size);
  for (const at::Tensor& t : list) {
    check_input(t, what);
    const auto got = shape<Int>(t);
    bool fits = got.size() == wanted.size();
    for (size_t i = 0; fits && i < got.size(); ++i) fits = got[i] == wanted[i];
    quire::check(fits, what, " must be ", c10::ArrayRef<Int>(wanted), ", got ", c10::ArrayRef<Int>(got));
    check_one_device(t.device(), device, what, " and x");
  }
}
template void check_list(const op::TensorList&, int64_t, c10::ArrayRef<int64_t>, const char*, at::Device);
template void check_list(const op::TensorList&, int64_t, c10::ArrayRef<c10::SymInt>, const char*, at::Device);

template <class Int>
std::array<op::Result<Int>, 7> LinearFwd::results(const Args& a) {
  check_input(a.x, "linear: x");
  const int64_t groups = group_count(a.offsets, a.x, "linear");
  const auto x = shape<Int>(a.x);
  check_arguments<Int>(a, groups, x.back());
  op::Result<Int> y{{}, a.dtype};
  y.sizes.append(x.begin(), x.end());
  y.sizes.back() = op::as<Int>(a.out_features);
  const op::Result<Int> none = op::absent<Int>(at::kByte), amax{{Int(groups)}, at::kFloat};
  if (!a.recipe->has_value()) return {y, none, none, none, none, none, none};
  const quire::LinearSpec& recipe = **a.recipe;
  const quire::Direction direction = saved_direction(recipe);
  auto kept_x =
      rows_results<Int>(recipe.x, {quire::product(x, 0, x.size() - 1), x.back(), groups}, a.offsets.has_value(),
                        direction, (a.save & kSaveX) && a.x_buffers.empty() && !recipe.weight_only);
  auto kept_w = stacked_results<Int>(recipe.w, {y.sizes.back(), x.back()}, groups, direction,
                                     (a.save & kSaveW) && a.w_buffers.empty());
  if (a.fwd_scale && a.x_buffers.empty()) kept_x[2] = amax;
  if (a.fwd_scale && a.w_buffers.empty()) kept_w[2] = amax;
  return {y, kept_x[0], kept_x[1], kept_x[2], kept_w[0], kept_w[1], kept_w[2]};
}
template std::array<op::Result<int64_t>, 7> LinearFwd::results<int64_t>(const Args&);
template std::array<op::Result<c10::SymInt>, 7> LinearFwd::results<c10::SymInt>(const Args&);

void LinearFwd::run(const Args& a, op::Tensors<7>& out, const quire::Context& context) {
  const int64_t n = op::as<int64_t>(a.out_features), k = a.x.size(-1);
  const quire::MutableMatrix y = mutable_matrix(out[0]);
  const GroupsView groups(a.offsets, y.rows, "linear");
  if (!a.recipe->has_value()) return plain(a, groups, y, context);
  check_fresh(a, groups, context);
  const quire::LinearSpec& recipe = **a.recipe;
  std::optional<GroupedCodes> x, w;
  std::optional<GivenOperand> given_x, given_w;
  if (!a.x_buffers.empty())
    given_x.emplace(a.x_buffers, GivenGroups{recipe.x, Direction::rowwise, groups, k, shape<int64_t>(a.x)},
                    "linear: x");
  if (!a.w_buffers.empty())
    given_w.emplace(a.w_buffers, GivenGroups::matrices(recipe.w, Direction::rowwise, groups.count(), {n, k}),
                    "linear: w");
  if (!given_x && !recipe.weight_only) x.emplace(quantize_x(a, groups, out, context));
  if (!given_w) w.emplace(quantize_w(a, groups, out, context));
  const quire::Operand w_codes = w ? w->operand(Direction::rowwise) : quire::Operand(*given_w);
  if (recipe.weight_only) return weight_only(a, groups, w_codes, y, context);
  const GroupBiases bias(a.bias, groups.count(), "linear: bias");
  quire::gemm({.a = x ? x->operand(Direction::rowwise) : quire::Operand(*given_x),
               .b = w_codes,
               .out = y,
               .bias = bias.all().data,
               .bias_dtype = bias.all().dtype,
               .role = quire::kFprop,
               .biases = bias.each()},
              context);
}

}  // namespace quire_torch
