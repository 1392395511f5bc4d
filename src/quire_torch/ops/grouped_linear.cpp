#include "quire_torch/ops/grouped_linear.h"

#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

#include "quire_torch/ops/destinations.h"
#include "quire_torch/ops/grouped_quantize.h"
#include "quire_torch/ops/state.h"
#include "quire_torch/ops/wgrad.h"

namespace quire_torch {
namespace {

using quire::Backward, quire::Direction;

/// How many groups of rows there are.
c10::SymInt groups_of(const op::OptionalTensor& offsets) { return offsets ? offsets->sym_size(0) : c10::SymInt(1); }

bool is_stacked(const op::GradientList& list, int64_t rank) {
  return list.tensors.size() == 1 && list.tensors[0].dim() > rank;
}

/// Whether w tells only shape and dtype.
bool only_codes(const GroupedLinear::Args& a) { return !a.w_buffers.empty() && !a.w_fingerprint; }

void check_lists(const GroupedLinear::Args& a) {
  check_input(a.x, "linear: x");
  quire::check(a.offsets.has_value() || !is_stacked(a.bias, 1),
               "linear: bias must be one vector where no offsets divide x into groups, got ",
               a.bias.tensors.empty() ? 0 : a.bias.tensors[0].dim(), " dimensions");
  if (!a.offsets && a.w.tensors.size() == 1) return check_agreement(a.x, a.w.tensors[0]);
  quire::check(a.offsets.has_value(), "linear: w must be one matrix where no offsets divide x into groups, got ",
               a.w.tensors.size());
  quire::check(!a.w.tensors.empty() && a.w.tensors[0].dim() >= 2,
               "linear: w must be matrices [out_features, in_features], one for each group, or one "
               "[groups, out_features, in_features]; got ",
               a.w.tensors.size(), " tensors", a.w.tensors.empty() ? "" : " of fewer dimensions");
  check_k(a.x, a.w.tensors[0]);
  // linear_fwd does not see a w that is given quantized, and backward makes a gradient for each group.
  if (only_codes(a))
    check_list<c10::SymInt>(a.w.tensors, group_count(a.offsets, a.x, "linear"),
                            {a.w.tensors[0].sym_size(-2), a.x.sym_size(-1)}, "linear: w", a.x.device());
}

LinearFwd::Args inner(const GroupedLinear::Args& a, int64_t save) {
  return {.x = a.x,
          .w = only_codes(a) ? op::TensorList() : a.w.tensors,
          .bias = a.bias.tensors,
          .offsets = a.offsets,
          .out_features = a.w.tensors[0].sym_size(-2),
          .recipe = a.recipe,
          .dtype = a.dtype,
          .save = save,
          .x_buffers = a.x_buffers,
          .w_buffers = a.w_buffers,
          .w_fingerprint = a.w_fingerprint,
          .fwd_scale = a.fwd_scale};
}

/// What backward multiplies; without a recipe, x and w themselves.
Backward mode_of(const OptionalRecipeText& recipe) { return *recipe ? (*recipe)->backward : Backward::high_precision; }

/// Whether codes are given for a tensor that has elements. Operators stand for absent ones with a tensor [0]: a number
/// while tracing too, where that of present ones may be unknown.
bool is_given(const std::optional<at::Tensor>& codes, const at::Tensor& of) {
  return codes && (codes->dim() != 1 || codes->sym_size(0).maybe_as_int() != 0 || of.sym_numel().maybe_as_int() == 0);
}

/// The half of x's given buffers that backward reads; an absent amax is `none`.
DirectionBuffers saved_buffers(const OptionalTensors& x_buffers, const at::Tensor& of, Direction direction,
                               const at::Tensor& none) {
  const size_t first = quire::first_buffer(direction);
  quire::check(x_buffers.size() == 6 && is_given(x_buffers[first], of) && is_given(x_buffers[first + 1], of),
               "linear: x is given without ", quire::kBufferNames[first],
               ", which the gradient of w needs; quantize it in both directions");
  return {*x_buffers[first], *x_buffers[first + 1], x_buffers[first + 2].value_or(none)};
}

/// The same of w's, six for each group or six of all.
op::OptionalTensorList saved_buffers_of_w(op::OptionalTensorList w_buffers, Direction direction) {
  const size_t first = quire::first_buffer(direction);
  for (size_t i = 0; i < w_buffers.size(); ++i) {
    quire::check(i % 6 != first || w_buffers[i], "linear: w",
                 w_buffers.size() > 6 ? quire::text(" of group ", i / 6) : "", " is given without ",
                 quire::kBufferNames[first],
                 ", which the gradient of x needs; quantize it in both directions, or, if it was quantized for "
                 "inference, run the model under torch.no_grad()");
    if (i % 6 < first || i % 6 >= first + 3) w_buffers[i].reset();
  }
  return w_buffers;
}

/// The flat buffers that forward returned, among six.
op::OptionalTensorList as_six_buffers(const DirectionBuffers& three, Direction direction) {
  op::OptionalTensorList six(6);
  std::copy(three.begin(), three.end(), six.begin() + static_cast<ptrdiff_t>(quire::first_buffer(direction)));
  return six;
}

/// Throws unless `t` is memory for a result [*, width] of the rows of x.
void check_memory(const GroupedLinear::Args& a, const op::OptionalTensor& t, const c10::SymInt& width,
                  const char* name) {
  if (!t) return;
  const auto x = a.x.sym_sizes(), got = t->sym_sizes();
  auto wanted = x.vec();
  wanted.back() = width;
  const c10::SymInt rows = c10::multiply_integers(x.slice(0, x.size() - 1));
  const auto equal = [](const c10::SymInt& one, const c10::SymInt& other) {
    return one.sym_eq(other).expect_true(__FILE__, __LINE__);
  };
  const bool shaped = got.size() == x.size() && std::equal(got.begin(), got.end(), wanted.begin(), equal),
             flat = got.size() == 2 && equal(got[1], width) && equal(got[0], rows);
  quire::check(shaped || flat, "linear: ", name, " must be ", c10::SymIntArrayRef(wanted), ", or [", rows, ", ", width,
               "], got ", got);
  quire::check(t->scalar_type() == a.dtype && t->is_contiguous() && t->device() == a.x.device(), "linear: ", name,
               " must be contiguous ", a.dtype, " on ", a.x.device(), ", as the result is; got ",
               t->is_contiguous() ? "" : "not contiguous ", t->scalar_type(), " on ", t->device());
  quire::check(!t->requires_grad(), "linear: ", name, " must not require a gradient; pass it detached");
  quire::check(!t->is_inference() || c10::InferenceMode::is_enabled(), "linear: ", name,
               " was made under torch.inference_mode and may be written there only; clone it");
  int64_t shared = 0;  // with one at least: itself
  op::for_each_tensor(a, [&](const at::Tensor& other) { shared += overlap(*t, other) ? 1 : 0; });
  quire::check(shared <= 1, "linear: ", name,
               " shares memory with another argument, which would be overwritten; give it memory of its own");
}

/// A copy of a result in memory of the caller's, if it gave any.
void copy_result(const at::Tensor& memory, const at::Tensor& result) {
  if (!memory.defined()) return;
  memory.view_symint(result.sym_sizes()).copy_(result);
  memory.unsafeGetTensorImpl()->bump_version();  // who saved it for a backward pass has to know
}

/// Again when backward begins: what it writes may have been resized since.
void check_backward(const GroupedLinear::Saved& s, const at::Tensor& dy) {
  const auto given = [](const at::Tensor& t) { return t.defined() ? op::OptionalTensor(t) : std::nullopt; };
  Destinations{given(s.sr_state.tensor), std::nullopt, given(s.bwd_amax.tensor), given(s.wgrad_stash.tensor),
               s.main_grad.tensors}
      .check(dy.device(), groups_of(s.offsets), {dy.sym_size(-1), s.in_features});
  const at::Tensor& memory = s.dgrad_out.tensor;
  auto wanted = dy.sym_sizes().vec();
  wanted.back() = s.in_features;
  quire::check(!memory.defined() || (memory.is_contiguous() && memory.scalar_type() == s.dtype &&
                                     memory.sym_numel() == c10::multiply_integers(wanted)),
               "linear: dgrad_out was changed since the forward pass and is no memory for ",
               c10::SymIntArrayRef(wanted), " any more");
}

void check_forward(const GroupedLinear::Args& a, op::Needs need) {
  check_lists(a);
  const at::Tensor& w = a.w.tensors[0];
  if (!a.offsets || a.offsets->dim() == 1)
    Destinations{a.sr_state, a.bwd_scale, a.bwd_amax, a.wgrad_stash, a.main_grad}.check(
        a.x.device(), groups_of(a.offsets), {w.sym_size(-2), w.sym_size(-1)});
  quire::check(a.bwd_scale || !a.bwd_amax, "linear: bwd_amax is given without bwd_scale; pass both");
  check_memory(a, a.out.value, a.w.tensors[0].sym_size(-2), "out");
  check_memory(a, a.dgrad_out, a.x.sym_size(-1), "dgrad_out");
  if (!a.recipe->has_value()) return;
  const quire::LinearSpec& recipe = **a.recipe;
  const Backward mode = recipe.backward;
  const bool keeps_x = mode == Backward::high_precision || mode == Backward::requantized;
  quire::check(!keeps_x || a.x_buffers.empty() || !need[kW],
               "linear: x is given quantized, but backward=", a.recipe.text().substr(a.recipe.text().rfind('=') + 1),
               " starts from x itself; pass x plain");
  quire::check(mode != Backward::requantized || !a.fwd_scale,
               "linear: backward=requantized does not go with delayed scaling: x would be quantized again when its "
               "scale has changed; pass no fwd_scale, or another backward");
  if (from_codes(mode) && recipe.dy.stochastic && (need[kX] || need[kW]) && !a.sr_state)
    quire::fail("linear: dy rounds stochastically under '", recipe.dy.to_string(),
                "' and needs sr_state, an int64 [2] tensor {seed, counter}; got none. quire.GroupedLinear has one");
}

RecipeText recipe_of(const GroupedLinear::Saved& s) { return RecipeText::parse(s.recipe.text()); }

bool external_wgrad(const GroupedLinear::Saved& s) {
  return !s.main_grad.tensors.empty() || s.wgrad_stash.tensor.defined();
}

/// Rows of dy.
c10::SymInt tokens_of(const at::Tensor& dy) {
  const auto sizes = dy.sym_sizes();
  return c10::multiply_integers(sizes.slice(0, sizes.size() - 1));
}

/// Keeps operands of the gradient of w, and offsets behind them if there are any.
void keep_for_later(const GroupedLinear::Saved& s, op::TensorList operands, c10::SymInt tokens) {
  if (s.offsets) operands.push_back(*s.offsets);
  keep_operands({{s.wgrad_stash.tensor}, std::move(operands), std::move(tokens), s.recipe, s.overwrite_main_grad});
}

/// The gradient of w elsewhere than in linear_bwd, of the columnwise dy which that returned.
void weight_gradient(const GroupedLinear::Saved& s, const RecipeText& recipe, const DirectionBuffers& dy,
                     const DirectionBuffers& x, c10::SymInt tokens) {
  if (s.wgrad_stash.tensor.defined()) {
    keep_for_later(s, {dy[0], dy[1], dy[2], x[0], x[1], x[2]}, std::move(tokens));
  } else {
    call_into<Wgrad>(s.main_grad.tensors, dy[0], dy[1], dy[2], x[0], x[1], x[2], s.offsets, std::move(tokens), recipe,
                     s.overwrite_main_grad);
  }
}

/// What autograd is given for w when its gradient went elsewhere.
at::Tensor delivered(const GroupedLinear::Saved& s, const at::Tensor& dy) {
  if (!s.placeholder) return {};
  std::vector<c10::SymInt> sizes{dy.sym_size(-1), s.in_features};
  if (s.offsets) sizes.insert(sizes.begin(), groups_of(s.offsets));
  return at::zeros_symint(sizes, dy.options().dtype(s.dtype));
}

/// x columnwise, which forward kept, or x itself to be quantized now.
DirectionBuffers columnwise_x(const GroupedLinear::Saved& s, const RecipeText& recipe, bool needed) {
  if (!needed || recipe->backward != Backward::requantized) return {s.x_data, s.x_scale, s.x_amax};
  return op::call<GroupedQuantize>(
      {.x = s.x_data, .offsets = s.offsets, .spec = text_of(recipe->x), .columnwise = true});
}

at::Tensor decode(const GroupedLinear::Saved& s, const DirectionBuffers& q, const quire::QuantSpec& spec,
                  const at::Tensor& like) {
  auto shape = like.sym_sizes().vec();
  shape.back() = s.in_features;
  return op::call<GroupedDequantize>({.data = q[0],
                                      .scale = q[1],
                                      .amax = q[2],
                                      .offsets = s.offsets,
                                      .spec = text_of(spec),
                                      .shape = std::move(shape),
                                      .dtype = s.dtype})[0];
}

/// dx as its quantized values, where the recipe has a spec for it.
at::Tensor rounded_dx(const GroupedLinear::Saved& s, const quire::QuantSpec& spec, const at::Tensor& dx) {
  const c10::SymInt groups = groups_of(s.offsets);
  std::optional<at::Tensor> scale;
  if (s.bwd_scale.defined()) scale = s.bwd_scale.narrow_symint(0, groups, groups);
  const DirectionBuffers q = op::call<GroupedQuantize>(
      {.x = dx, .offsets = s.offsets, .spec = text_of(spec), .columnwise = false, .scale = scale});
  if (scale && s.bwd_amax.tensor.defined()) op::call<AmaxMax>({{s.bwd_amax.tensor}, q[2], 1});
  return decode(s, q, spec, dx);
}

op::Tensors<3> quantized_backward(const GroupedLinear::Saved& s, const at::Tensor& dy, op::Needs need) {
  const RecipeText recipe = recipe_of(s);
  const bool quantizes = need[kX] || need[kW];
  const bool stochastic = recipe->dy.stochastic && s.sr_state.tensor.defined();
  const bool external = need[kW] && external_wgrad(s);
  const auto scale = quantizes && s.bwd_scale.defined() ? std::optional(s.bwd_scale) : std::nullopt;
  const DirectionBuffers x = columnwise_x(s, recipe, need[kW]);
  auto g = op::call<LinearBwd>({.dy = dy,
                                .offsets = s.offsets,
                                .x_data = x[0],
                                .x_scale = x[1],
                                .x_amax = x[2],
                                .w_buffers = s.w_buffers,
                                .in_features = s.in_features,
                                .recipe = recipe,
                                .dtype = s.dtype,
                                .needs = needed_gradients(need, external),
                                .sr_state = stochastic ? std::optional(s.sr_state.tensor) : std::nullopt,
                                .bwd_scale = scale});
  // First what may still refuse its operands, so that a refused call has changed nothing.
  if (external) weight_gradient(s, recipe, {g[3], g[4], g[5]}, x, tokens_of(dy));
  if (stochastic) op::call<SrAdvance>({.sr_state = {s.sr_state.tensor}});
  if (scale && s.bwd_amax.tensor.defined()) op::call<AmaxMax>({{s.bwd_amax.tensor}, g[5], 0});
  if (need[kX] && recipe->dx) g[0] = rounded_dx(s, *recipe->dx, g[0]);
  return {g[0], external ? delivered(s, dy) : g[1], g[2]};
}

/// x as a backward pass multiplies it that does not multiply codes.
at::Tensor plain_x(const GroupedLinear::Saved& s, const at::Tensor& dy) {
  if (mode_of(s.recipe) == Backward::high_precision) return s.x_data;
  return decode(s, {s.x_data, s.x_scale, s.x_amax}, (*s.recipe)->x, dy);
}

/// Gradients as products of plain tensors (numerics.md 6.8).
op::Tensors<3> unquantized_backward(const GroupedLinear::Saved& s, const at::Tensor& dy, op::Needs need) {
  const at::Tensor x = need[kW] ? plain_x(s, dy) : dy.new_empty({0});
  const bool external = need[kW] && external_wgrad(s), later = external && s.wgrad_stash.tensor.defined();
  op::Tensors<3> g =
      op::call<LinearUnquantizedBwd>({.dy = dy,
                                      .offsets = s.offsets,
                                      .x = x,
                                      .w = s.w,
                                      .w_buffers = s.w_buffers,
                                      .in_features = s.in_features,
                                      .recipe = s.recipe,
                                      .dtype = s.dtype,
                                      .needs = needed_gradients(need) & (later ? ~kNeedsW : ~int64_t{0})});
  if (later) {
    keep_for_later(s, {dy.to(s.dtype), x.to(s.dtype)}, tokens_of(dy));
  } else if (external) {
    call_into<Accumulate>(s.main_grad.tensors, g[1], s.overwrite_main_grad);
  }
  if (external) g[1] = delivered(s, dy);
  return g;
}

}  // namespace

op::Tensors<3> GroupedLinear::inference(const Args& a) {
  check_forward(a, {});
  const auto r = op::call<LinearFwd>(inner(a, 0));
  copy_result(a.out.value.value_or(at::Tensor()), r[0]);
  return {r[0], r[3], r[6]};
}

std::pair<op::Tensors<3>, GroupedLinear::Saved> GroupedLinear::forward(const Args& a, op::Needs need) {
  check_forward(a, need);
  const Backward mode = mode_of(a.recipe);
  // Each operand is kept for the gradient of the other one.
  const bool keep_x = need[kW], keep_w = need[kX];
  const bool codes_of_x = mode == Backward::quantized || mode == Backward::dequantized,
             codes_of_w = mode != Backward::high_precision || only_codes(a);
  const auto r =
      op::call<LinearFwd>(inner(a, (keep_x && codes_of_x ? kSaveX : 0) | (keep_w && codes_of_w ? kSaveW : 0)));
  DirectionBuffers x{r[1], r[2], r[3]};
  if (keep_x && !codes_of_x) x = {a.x, r[2], r[3]};
  if (keep_x && codes_of_x && !a.x_buffers.empty())
    x = saved_buffers(a.x_buffers, a.x, saved_direction(**a.recipe), r[3]);
  const Direction direction_of_w = from_codes(mode) ? Direction::columnwise : Direction::rowwise;
  copy_result(a.out.value.value_or(at::Tensor()), r[0]);
  return {{r[0], r[3], r[6]},
          {.offsets = a.offsets,
           .x_data = x[0],
           .x_scale = x[1],
           .x_amax = x[2],
           .bwd_scale = a.bwd_scale ? a.bwd_scale->clone() : at::Tensor(),
           .w = keep_w && !codes_of_w ? a.w.tensors : op::TensorList(),
           .w_buffers = !keep_w || !codes_of_w ? op::OptionalTensorList()
                        : a.w_buffers.empty()  ? as_six_buffers({r[4], r[5], r[6]}, direction_of_w)
                                               : saved_buffers_of_w(a.w_buffers, direction_of_w),
           .sr_state = {a.sr_state.value_or(at::Tensor())},
           .bwd_amax = {a.bwd_amax.value_or(at::Tensor())},
           .wgrad_stash = {a.wgrad_stash.value_or(at::Tensor())},
           .dgrad_out = {a.dgrad_out.value_or(at::Tensor())},
           .main_grad = {a.main_grad},
           .in_features = a.x.sym_size(-1),
           .recipe = a.recipe,
           .dtype = a.dtype,
           .stacked_w = is_stacked(a.w, 2),
           .stacked_bias = is_stacked(a.bias, 1),
           .overwrite_main_grad = a.overwrite_main_grad,
           .placeholder = a.placeholder}};
}

op::Tensors<3> GroupedLinear::gradients(const Saved& s, const at::Tensor& dy, op::Needs need) {
  check_backward(s, dy);
  op::Tensors<3> g =
      from_codes(mode_of(s.recipe)) ? quantized_backward(s, dy, need) : unquantized_backward(s, dy, need);
  if (need[kX]) copy_result(s.dgrad_out.tensor, g[0]);
  return g;
}

op::Tensors<11> GroupedLinear::backward(const Saved& s, const op::Tensors<3>& grads, op::Needs need) {
  op::Tensors<3> g = gradients(s, grads[0], need);
  // The gradient of a list has a leading dimension of its tensors: of one tensor for all groups, one.
  const auto listed = [&](at::Tensor& gradient, bool stacked) {
    if (gradient.defined() && (!s.offsets || stacked)) gradient = gradient.unsqueeze(0);
  };
  listed(g[1], s.stacked_w);
  if (need[kBias]) listed(g[2], s.stacked_bias);
  return {g[0], g[1], g[2], {}, {}, {}, {}, {}, {}, {}, {}};
}

}  // namespace quire_torch
