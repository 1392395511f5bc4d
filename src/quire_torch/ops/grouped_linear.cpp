#include "quire_torch/ops/grouped_linear.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/where.h>
#include <c10/core/InferenceMode.h>

#include "quire_torch/op/device.h"

namespace quire_torch {
namespace {

using quire::Backward, quire::Direction;

bool is_stacked(const op::GradientList& list, int64_t dims) {
  return list.tensors.size() == 1 && list.tensors[0].dim() > dims;
}

/// Whether w tells only shape and dtype.
bool only_codes(const GroupedLinear::Args& a) { return !a.w_buffers.empty() && !a.w_fingerprint; }

/// Whether backward multiplies codes of w, or their values.
bool codes_of_w(const GroupedLinear::Args& a) { return mode_of(a.recipe) != Backward::high_precision || only_codes(a); }

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
    quire::check(
        i % 6 != first || w_buffers[i], "linear: w", w_buffers.size() > 6 ? quire::text(" of group ", i / 6) : "",
        " is given without ", quire::kBufferNames[first],
        ", which the gradient of x needs. If it was quantized for inference, run the model under torch.no_grad(); "
        "to get gradients of x (adapters, LoRA), convert it with quire.convert(..., for_inference=True, "
        "gradients=\"input\"), and run it outside of quire.autocast. Recipes with x=none or backward=dequantized give "
        "these gradients too");
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

/// One state of a layer: 1-dimensional, of `size` elements, on the device of x; or not there. name: and what it holds.
void check_vector(const op::OptionalTensor& t, at::ScalarType dtype, const c10::SymInt& size, at::Device device,
                  std::array<const char*, 2> name) {
  if (t) check_one_device(t->device(), device, "linear: ", name[0], " and x");
  if (!t || (t->scalar_type() == dtype && t->dim() == 1 && t->sym_size(0) == size && t->is_contiguous())) return;
  quire::fail("linear: ", name[0], " must be a contiguous ", dtype == at::kLong ? "int64" : "float32", " [", size,
              "] tensor ", name[1], ", got ", t->scalar_type(), " ", t->sym_sizes());
}

/// Throws unless the stash is one, on the CPU.
void check_stash(const op::OptionalTensor& stash) {
  if (!stash) return;
  check_vector(stash, at::kLong, 2, stash->device(), {"wgrad_stash", "{number, count}"});
  quire::check(op::on_host(stash->device()),
               "linear: wgrad_stash must be on the CPU, whichever device computes, got it on ", stash->device(),
               "; move it with .cpu()");
}

/// Throws unless main_grad is a matrix of w's sizes for each group, or one tensor for all of them.
void check_main_grad(const op::TensorList& main_grad, const c10::SymInt& groups,
                     const std::array<c10::SymInt, 2>& weight, at::Device device) {
  for (const at::Tensor& t : main_grad) check_one_device(t.device(), device, "linear: main_grad and x");
  const bool stacked = main_grad.size() == 1 && main_grad[0].dim() == 3;
  quire::check(stacked || groups == static_cast<int64_t>(main_grad.size()),
               "linear: main_grad must be a matrix for each of the ", groups,
               " groups, or one tensor for all of them; got ", main_grad.size());
  std::vector<c10::SymInt> wanted(weight.begin(), weight.end());
  if (stacked) wanted.insert(wanted.begin(), groups);
  for (const at::Tensor& t : main_grad)
    quire::check(dtype(t.scalar_type(), "linear: main_grad") != quire::DType::u8 && t.is_contiguous() &&
                     t.sym_sizes() == c10::SymIntArrayRef(wanted),
                 "linear: each main_grad must be contiguous float32, float16 or bfloat16 of w's shape ",
                 c10::SymIntArrayRef(wanted), ", got ", t.scalar_type(), " ", t.sym_sizes(),
                 t.is_contiguous() ? "" : " (not contiguous)");
}

/// Throws unless `t` is memory for a result [*, width] of the rows of x.
void check_memory(const GroupedLinear::Args& a, const at::Tensor& t, const c10::SymInt& width, const char* name) {
  const auto x = a.x.sym_sizes(), got = t.sym_sizes();
  auto wanted = x.vec();
  wanted.back() = width;
  const c10::SymInt rows = rows_of(a.x);
  const auto equal = [](const c10::SymInt& one, const c10::SymInt& other) {
    return one.sym_eq(other).expect_true(__FILE__, __LINE__);
  };
  const bool shaped = got.size() == x.size() && std::equal(got.begin(), got.end(), wanted.begin(), equal),
             flat = got.size() == 2 && equal(got[1], width) && equal(got[0], rows);
  quire::check(shaped || flat, "linear: ", name, " must be ", c10::SymIntArrayRef(wanted), ", or [", rows, ", ", width,
               "], got ", got);
  quire::check(t.scalar_type() == a.dtype && t.is_contiguous() && t.device() == a.x.device(), "linear: ", name,
               " must be contiguous ", a.dtype, " on ", a.x.device(), ", as the result is; got ",
               t.is_contiguous() ? "" : "not contiguous ", t.scalar_type(), " on ", t.device());
  quire::check(!t.requires_grad(), "linear: ", name, " must not require a gradient; pass it detached");
  quire::check(!t.is_inference() || c10::InferenceMode::is_enabled(), "linear: ", name,
               " was made under torch.inference_mode and may be written there only; clone it");
  int64_t shared = 0;  // with one at least: itself
  op::for_each_tensor(a, [&](const at::Tensor& other) { shared += overlap(t, other) ? 1 : 0; });
  quire::check(shared <= 1, "linear: ", name,
               " shares memory with another argument, which would be overwritten; give it memory of its own");
}

}  // namespace

void Destinations::check(at::Device device, const c10::SymInt& groups, const std::array<c10::SymInt, 2>& weight) const {
  check_vector(sr_state, at::kLong, 2, device, {"sr_state", "{seed, counter}"});
  check_vector(bwd_scale, at::kFloat, groups * 2, device, {"bwd_scale", "{dy, dx}"});
  check_vector(bwd_amax, at::kFloat, groups * 2, device, {"bwd_amax", "{dy, dx}"});
  check_stash(wgrad_stash);
  if (!main_grad.empty()) check_main_grad(main_grad, groups, weight, device);
}

/// Follows the spec of dy.
constexpr std::string_view kNeedsSrState =
    "' and needs sr_state, an int64 [2] tensor {seed, counter}; got none. quire's layers have one; a program that was "
    "exported under torch.no_grad() has none, and runs under torch.no_grad()";

void GroupedLinear::check(const Args& a, op::Needs need) {
  check_lists(a);
  const at::Tensor& w = a.w.tensors[0];
  if (!a.offsets || a.offsets->dim() == 1)
    Destinations{a.sr_state, a.bwd_scale, a.bwd_amax, a.wgrad_stash, a.main_grad}.check(
        a.x.device(), groups_of(a.offsets), {w.sym_size(-2), w.sym_size(-1)});
  quire::check(a.bwd_scale || !a.bwd_amax, "linear: bwd_amax is given without bwd_scale; pass both");
  if (a.out.value) check_memory(a, *a.out.value, a.w.tensors[0].sym_size(-2), "out");
  if (a.dgrad_out) check_memory(a, *a.dgrad_out, a.x.sym_size(-1), "dgrad_out");
  if (!a.recipe->has_value()) return;
  const quire::LinearSpec& recipe = **a.recipe;
  const Backward mode = recipe.backward;
  if (keeps_x(a.recipe) && !a.x_buffers.empty() && need[kW])
    quire::fail("linear: x is given quantized, but backward=", quire::to_string(mode),
                " starts from x itself; pass x plain");
  quire::check(mode != Backward::requantized || !a.fwd_scale,
               "linear: backward=requantized does not go with delayed scaling: x would be quantized again when its "
               "scale has changed; pass no fwd_scale, or another backward");
  if (from_codes(mode) && recipe.dy.stochastic && (need[kX] || need[kW]) && !a.sr_state)
    quire::fail("linear: dy rounds stochastically under '", recipe.dy.to_string(), kNeedsSrState);
}

void copy_result(const at::Tensor& memory, const at::Tensor& result, const op::OptionalTensor& offsets) {
  at::Tensor to = memory.view_symint(result.sym_sizes());
  if (offsets) {
    const at::Tensor rows = at::arange(rows_of(result), offsets->options());
    auto sizes = result.sym_sizes().vec();
    sizes.back() = 1;
    at::where_out(to, rows.lt(offsets->select(0, -1)).view_symint(sizes), result, to);
  } else {
    to.copy_(result);
  }
  memory.unsafeGetTensorImpl()->bump_version();  // who saved it for a backward pass has to know
}

op::Tensors<3> GroupedLinear::inference(const Args& a) {
  check(a, {});
  const auto r = op::call<LinearFwd>(inner(a, 0));
  if (a.out.value) copy_result(*a.out.value, r[0], a.offsets);
  return {r[0], r[3], r[6]};
}

std::pair<op::Tensors<3>, GroupedLinear::Saved> GroupedLinear::forward(const Args& a, op::Needs need) {
  check(a, need);
  const auto [r, x] = product(a, need);
  if (a.out.value) copy_result(*a.out.value, r[0], a.offsets);
  return {{r[0], r[3], r[6]}, saved(a, x, r, need)};
}

std::pair<op::Tensors<7>, DirectionBuffers> GroupedLinear::product(const Args& a, op::Needs need) {
  const bool codes_of_x = !keeps_x(a.recipe);
  // Each operand is kept for the gradient of the other one.
  const int64_t save = (need[kW] && codes_of_x ? kSaveX : 0) | (need[kX] && codes_of_w(a) ? kSaveW : 0);
  op::Tensors<7> r = op::call<LinearFwd>(inner(a, save));
  DirectionBuffers x{r[1], r[2], r[3]};
  if (need[kW] && !codes_of_x) x[0] = a.x;
  if (need[kW] && codes_of_x && !a.x_buffers.empty())
    x = saved_buffers(a.x_buffers, a.x, saved_direction(**a.recipe), r[3]);
  return {std::move(r), std::move(x)};
}

GroupedLinear::Saved GroupedLinear::saved(const Args& a, const DirectionBuffers& x, const op::Tensors<7>& r,
                                          op::Needs need) {
  const Direction direction_of_w = from_codes(mode_of(a.recipe)) ? Direction::columnwise : Direction::rowwise;
  return {.offsets = a.offsets,
          .x_data = x[0],
          .x_scale = x[1],
          .x_amax = x[2],
          .bwd_scale = a.bwd_scale ? a.bwd_scale->clone() : at::Tensor(),
          .w = need[kX] && !codes_of_w(a) ? a.w.tensors : op::TensorList(),
          .w_buffers = !need[kX] || !codes_of_w(a) ? op::OptionalTensorList()
                       : a.w_buffers.empty()       ? as_six_buffers({r[4], r[5], r[6]}, direction_of_w)
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
          .placeholder = a.placeholder};
}

// One group of rows

namespace {

op::TensorList bias_list(const op::OptionalTensor& bias) { return bias ? op::TensorList{*bias} : op::TensorList(); }

/// The same of one group.
GroupedLinear::Args one_group(const Linear::Args& a) {
  return {.x = a.x,
          .w = {{a.w}},
          .bias = {bias_list(a.bias)},
          .offsets = std::nullopt,
          .recipe = a.recipe,
          .dtype = a.dtype,
          .sr_state = a.sr_state};
}
GroupedLinear::Args one_group(const LinearPrequantized::Args& a) {
  GroupedLinear::Args one = one_group({a.x, a.w, a.bias, a.recipe, a.dtype, a.sr_state});
  one.x_buffers = a.x_buffers;
  one.w_buffers = a.w_buffers;
  one.w_fingerprint = a.w_fingerprint;
  return one;
}

/// y without what a backward pass needs: what nearly every call for inference is, so without the copies of one_group().
op::Tensors<1> product(const LinearFwd::Args& a) { return {op::call<LinearFwd, /*all=*/false>(a)[0]}; }

std::pair<op::Tensors<1>, GroupedLinear::Saved> y_and_saved(const GroupedLinear::Args& a, op::Needs need) {
  auto [results, saved] = GroupedLinear::forward(a, need);
  return {{std::move(results[0])}, std::move(saved)};
}

}  // namespace

op::Tensors<1> Linear::inference(const Args& a) {
  check_agreement(a.x, a.w);
  return product({.x = a.x,
                  .w = {a.w},
                  .bias = bias_list(a.bias),
                  .offsets = std::nullopt,
                  .out_features = a.w.sym_size(0),
                  .recipe = a.recipe,
                  .dtype = a.dtype,
                  .save = 0});
}

op::Tensors<1> LinearPrequantized::inference(const Args& a) {
  check_agreement(a.x, a.w);
  return product({.x = a.x,
                  .w = a.w_buffers.empty() || a.w_fingerprint ? op::TensorList{a.w} : op::TensorList(),
                  .bias = bias_list(a.bias),
                  .offsets = std::nullopt,
                  .out_features = a.w.sym_size(0),
                  .recipe = a.recipe,
                  .dtype = a.dtype,
                  .save = 0,
                  .x_buffers = a.x_buffers,
                  .w_buffers = a.w_buffers,
                  .w_fingerprint = a.w_fingerprint});
}

std::pair<op::Tensors<1>, Linear::Saved> Linear::forward(const Args& a, op::Needs need) {
  return y_and_saved(one_group(a), need);
}
std::pair<op::Tensors<1>, LinearPrequantized::Saved> LinearPrequantized::forward(const Args& a, op::Needs need) {
  return y_and_saved(one_group(a), need);
}

template op::Tensors<1> op::detail::record<Linear>(const Linear::Args& a);
template op::Tensors<1> op::detail::record<LinearPrequantized>(const LinearPrequantized::Args& a);

}  // namespace quire_torch
