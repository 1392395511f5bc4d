#include "quire_torch/ops/linear.h"

#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros.h>

#include "quire_torch/ops/state.h"

namespace quire_torch {
namespace {

using quire::Backward;

/// linear_fwd does not see a w that is given quantized.
void check_contraction(const LinearGiven::Args& a) {
  if (a.w_buffers.empty() || a.x.dim() == 0) return;
  quire::check(a.x.sym_size(-1) == a.w.sym_size(-1), "linear: x and w must agree on K; got x [..., ", a.x.sym_size(-1),
               "] and w ", a.w.sym_sizes());
}

LinearFwd::Args inner(const LinearGiven::Args& a, int64_t save) {
  check_contraction(a);
  return {.x = a.x,
          .w = a.w_buffers.empty() || a.w_fingerprint ? std::optional(a.w) : std::nullopt,
          .bias = a.bias,
          .out_features = a.w.sym_size(0),
          .recipe = a.recipe,
          .dtype = a.dtype,
          .save = save,
          .x_buffers = a.x_buffers,
          .w_buffers = a.w_buffers,
          .w_fingerprint = a.w_fingerprint};
}

/// Three of an operand's six given buffers, from `first` on; an absent amax is `none`.
Three three_of(const OptionalTensors& buffers, size_t first, const at::Tensor& none, const char* what) {
  quire::check(buffers.size() == 6, what, "'s buffers must be the six of quire.TensorProto, got ", buffers.size());
  quire::check(buffers[first].has_value(), what, " is given without ", quire::kBufferNames[first],
               ", which the gradient of the other operand needs; quantize it in both directions");
  return {*buffers[first], buffers[first + 1].value_or(none), buffers[first + 2].value_or(none)};
}

/// Quantized here, so that backward decodes exactly what the product saw.
void quantize_rowwise(const at::Tensor& t, const quire::QuantSpec& spec, OptionalTensors& buffers) {
  if (!buffers.empty()) return;
  const auto q = op::call<Quantize>({.x = t, .spec = text_of(spec), .rowwise = true});
  buffers.assign(q.begin(), q.end());
}

void check_pair(const op::OptionalTensor& t, at::ScalarType dtype, const char* what) {
  if (!t || (t->scalar_type() == dtype && t->dim() == 1 && t->size(0) == 2 && t->is_contiguous())) return;
  quire::fail("linear: ", what, ", got ", t->scalar_type(), " ", t->sizes());
}

/// What backward will write to: a refusal there would come after others of its writes.
void check_state(const LinearGiven::Args& a) {
  check_pair(a.sr_state, at::kLong, "sr_state must be a contiguous int64 [2] tensor {seed, counter}");
  check_pair(a.bwd_scale, at::kFloat, "bwd_scale must be a contiguous float32 [2] tensor {dy, dx}");
  check_pair(a.bwd_amax, at::kFloat, "bwd_amax must be a contiguous float32 [2] tensor {dy, dx}");
  check_pair(a.wgrad_stash, at::kLong, "wgrad_stash must be a contiguous int64 [2] tensor {number, count}");
  check_on_host(a.wgrad_stash, "linear");
  quire::check(a.bwd_scale.has_value() || !a.bwd_amax, "linear: bwd_amax is given without bwd_scale; pass both");
  if (a.main_grad) check_destination(*a.main_grad, a.w.sym_sizes(), "linear");
}

/// The same when backward begins: what it writes may have been resized since.
void check_state(const LinearGiven::Saved& s, const at::Tensor& dy, op::Needs need) {
  const auto given = [](const op::State& state) {
    return state.tensor.defined() ? op::OptionalTensor(state.tensor) : std::nullopt;
  };
  check_pair(given(s.sr_state), at::kLong, "sr_state must be a contiguous int64 [2] tensor {seed, counter}");
  check_pair(given(s.bwd_amax), at::kFloat, "bwd_amax must be a contiguous float32 [2] tensor {dy, dx}");
  check_pair(given(s.wgrad_stash), at::kLong, "wgrad_stash must be a contiguous int64 [2] tensor {number, count}");
  check_on_host(given(s.wgrad_stash), "linear");
  if (need[kW] && s.main_grad.tensor.defined())
    check_destination(s.main_grad.tensor, std::array{dy.sym_size(-1), s.in_features}, "linear");
}

void check_forward(const LinearGiven::Args& a, op::Needs need) {
  check_state(a);
  quire::check(a.w.dim() == 2, "linear: w must be [out_features, in_features], got ", a.w.dim(), " dimensions");
  if (a.recipe->dy.stochastic && from_codes(a.recipe->backward) && (need[kX] || need[kW]) && !a.sr_state)
    quire::fail("linear: dy rounds stochastically under '", a.recipe->dy.to_string(),
                "' and needs sr_state, an int64 [2] tensor {seed, counter}; got none. quire.Linear has one");
  const bool keeps_x = a.recipe->backward == Backward::requantized || a.recipe->backward == Backward::high_precision;
  quire::check(!keeps_x || a.x_buffers.empty() || !need[kW],
               "linear: x is given quantized, but backward=", a.recipe.text().substr(a.recipe.text().rfind('=') + 1),
               " starts from x itself; pass x as a plain tensor");
}

at::Tensor decode(const Three& q, const quire::QuantSpec& spec, std::vector<c10::SymInt> shape, at::ScalarType dtype) {
  return op::call<Dequantize>({.data = q[0],
                               .scale = q[1],
                               .amax = q[2],
                               .spec = text_of(spec),
                               .columnwise = false,
                               .shape = std::move(shape),
                               .dtype = dtype})[0];
}

/// x or w as backward multiplies it where it does not multiply codes.
at::Tensor plain_operand(const LinearGiven::Saved& s, const Three& kept, const quire::QuantSpec& spec,
                         std::vector<c10::SymInt> shape) {
  if (s.recipe->backward == Backward::high_precision) return kept[0].to(s.dtype);
  return decode(kept, spec, std::move(shape), s.dtype);
}

at::Tensor as_matrix(const at::Tensor& t) { return t.dim() == 1 ? t.unsqueeze(0) : t.flatten(0, -2); }

/// What autograd is given for w when its gradient went elsewhere.
at::Tensor delivered(const LinearGiven::Saved& s, const at::Tensor& dy) {
  if (!s.placeholder) return {};
  return at::zeros_symint({dy.sym_size(-1), s.in_features}, dy.options().dtype(s.dtype));
}

OptionalRecipeText stashed_recipe(const LinearGiven::Saved& s) { return OptionalRecipeText::parse(s.recipe.text()); }

/// The gradient of w as a plain product: kept for later, or into main_grad, or returned.
at::Tensor plain_weight_gradient(const LinearGiven::Saved& s, const at::Tensor& dy, const at::Tensor& x) {
  if (s.wgrad_stash.tensor.defined()) {
    keep_operands({{s.wgrad_stash.tensor}, {dy, x}, dy.sym_size(0), stashed_recipe(s), s.overwrite_main_grad});
    return delivered(s, dy);
  }
  const at::Tensor product = at::matmul(dy.t(), x);
  if (!s.main_grad.tensor.defined()) return product;
  op::call<Accumulate>({{s.main_grad.tensor}, product, s.overwrite_main_grad});
  return delivered(s, dy);
}

/// Gradients as products of unquantized tensors (numerics.md 6.8).
op::Tensors<9> plain_backward(const LinearGiven::Saved& s, const at::Tensor& dy, op::Needs need) {
  op::Tensors<9> out;
  const at::Tensor g = dy.to(s.dtype);
  auto shape = dy.sym_sizes().vec();
  const c10::SymInt n = shape.back();
  shape.back() = s.in_features;
  if (need[kX])
    out[kX] = at::matmul(g, plain_operand(s, {s.w_data, s.w_scale, s.w_amax}, s.recipe->w, {n, s.in_features}));
  if (need[kW]) {
    const at::Tensor x = plain_operand(s, {s.x_data, s.x_scale, s.x_amax}, s.recipe->x, shape);
    out[kW] = plain_weight_gradient(s, as_matrix(g), as_matrix(x));
  }
  if (need[kBias]) {
    const at::Tensor none = dy.new_empty({0});
    out[kBias] = op::call<LinearBwd>({.dy = dy,
                                      .x_data = none,
                                      .x_scale = none,
                                      .x_amax = none,
                                      .w_data = none,
                                      .w_scale = none,
                                      .w_amax = none,
                                      .in_features = s.in_features,
                                      .recipe = s.recipe,
                                      .dtype = s.dtype,
                                      .needs = kNeedsBias})[2];
  }
  return out;
}

/// One slot of delayed scaling's gradient scales.
std::optional<at::Tensor> scale_of(const LinearGiven::Saved& s, int64_t slot) {
  if (!s.bwd_scale.defined()) return std::nullopt;
  return s.bwd_scale.narrow(0, slot, 1);
}

void collect_amax(const LinearGiven::Saved& s, const at::Tensor& amax, int64_t slot) {
  if (s.bwd_amax.tensor.defined()) op::call<AmaxMax>({{s.bwd_amax.tensor}, amax, slot});
}

/// dx as its quantized values, where the recipe has a spec for it.
at::Tensor rounded_dx(const LinearGiven::Saved& s, const at::Tensor& dx) {
  const quire::QuantSpec& spec = *s.recipe->dx;
  const auto q = op::call<Quantize>(
      {.x = dx, .spec = text_of(spec), .rowwise = true, .columnwise = false, .scale = scale_of(s, 1)});
  if (s.bwd_scale.defined()) collect_amax(s, q[2], 1);
  return decode({q[0], q[1], q[2]}, spec, dx.sym_sizes().vec(), dx.scalar_type());
}

/// x columnwise, which forward kept, or x itself to be quantized now.
Three columnwise_x(const LinearGiven::Saved& s, bool needed) {
  if (!needed || s.recipe->backward != Backward::requantized) return {s.x_data, s.x_scale, s.x_amax};
  const auto q =
      op::call<Quantize>({.x = s.x_data, .spec = text_of(s.recipe->x), .rowwise = false, .columnwise = true});
  return {q[3], q[4], q[5]};
}

/// The gradient of w elsewhere than in linear_bwd, of the columnwise dy which that returned.
void weight_gradient(const LinearGiven::Saved& s, const Three& dy, const Three& x, c10::SymInt tokens) {
  if (s.wgrad_stash.tensor.defined()) {
    keep_operands({{s.wgrad_stash.tensor},
                   {dy[0], dy[1], dy[2], x[0], x[1], x[2]},
                   tokens,
                   stashed_recipe(s),
                   s.overwrite_main_grad});
  } else {
    op::call<Wgrad>({.main_grad = {s.main_grad.tensor},
                     .dy_data = dy[0],
                     .dy_scale = dy[1],
                     .dy_amax = dy[2],
                     .x_data = x[0],
                     .x_scale = x[1],
                     .x_amax = x[2],
                     .tokens = std::move(tokens),
                     .recipe = s.recipe,
                     .overwrite = s.overwrite_main_grad});
  }
}

}  // namespace

op::Tensors<1> LinearGiven::inference(const Args& a) { return {op::call<LinearFwd, /*all=*/false>(inner(a, 0))[0]}; }

std::pair<op::Tensors<1>, LinearGiven::Saved> LinearGiven::forward(const Args& given, op::Needs need) {
  check_forward(given, need);
  Args a = given;
  const Backward mode = a.recipe->backward;
  // Each operand is kept for the gradient of the other one.
  const bool keep_x = need[kW], keep_w = need[kX];
  if (mode == Backward::dequantized) {
    if (keep_x) quantize_rowwise(a.x, a.recipe->x, a.x_buffers);
    if (keep_w) quantize_rowwise(a.w, a.recipe->w, a.w_buffers);
  }
  const bool codes_of_x = mode == Backward::quantized, codes_of_w = from_codes(mode);
  const auto r =
      op::call<LinearFwd>(inner(a, (keep_x && codes_of_x ? kSaveX : 0) | (keep_w && codes_of_w ? kSaveW : 0)));
  const auto kept = [&](const at::Tensor& t, const OptionalTensors& buffers, bool codes, size_t made,
                        const char* what) -> Three {
    const at::Tensor& none = r[made + 2];
    if (mode == Backward::dequantized) return three_of(buffers, 0, none, what);
    if (!codes) return {t, none, none};
    return buffers.empty() ? Three{r[made], r[made + 1], r[made + 2]} : three_of(buffers, 3, none, what);
  };
  const Three x = keep_x ? kept(a.x, a.x_buffers, codes_of_x, 1, "linear: x") : Three{r[1], r[2], r[3]};
  const Three w = keep_w ? kept(a.w, a.w_buffers, codes_of_w, 4, "linear: w") : Three{r[4], r[5], r[6]};
  return {{r[0]},
          {.x_data = x[0],
           .x_scale = x[1],
           .x_amax = x[2],
           .w_data = w[0],
           .w_scale = w[1],
           .w_amax = w[2],
           .bwd_scale = a.bwd_scale ? a.bwd_scale->clone() : at::Tensor(),
           .sr_state = {a.sr_state.value_or(at::Tensor())},
           .bwd_amax = {a.bwd_amax.value_or(at::Tensor())},
           .main_grad = {a.main_grad.value_or(at::Tensor())},
           .wgrad_stash = {a.wgrad_stash.value_or(at::Tensor())},
           .in_features = a.x.sym_size(-1),
           .recipe = a.recipe,
           .dtype = a.dtype,
           .overwrite_main_grad = a.overwrite_main_grad,
           .placeholder = a.placeholder}};
}

op::Tensors<9> LinearGiven::backward(const Saved& s, const op::Tensors<1>& grads, op::Needs need) {
  const at::Tensor& dy = grads[0];
  check_state(s, dy, need);
  if (!from_codes(s.recipe->backward)) return plain_backward(s, dy, need);
  const bool apart = need[kW] && (s.main_grad.tensor.defined() || s.wgrad_stash.tensor.defined());
  const bool quantizes = need[kX] || need[kW];
  const bool stochastic = s.recipe->dy.stochastic && s.sr_state.tensor.defined();
  const Three x = columnwise_x(s, need[kW]);
  auto g = op::call<LinearBwd>({.dy = dy,
                                .x_data = x[0],
                                .x_scale = x[1],
                                .x_amax = x[2],
                                .w_data = s.w_data,
                                .w_scale = s.w_scale,
                                .w_amax = s.w_amax,
                                .in_features = s.in_features,
                                .recipe = s.recipe,
                                .dtype = s.dtype,
                                .needs = needed_gradients(need, apart),
                                .sr_state = stochastic ? std::optional(s.sr_state.tensor) : std::nullopt,
                                .dy_scale = quantizes ? scale_of(s, 0) : std::nullopt});
  if (stochastic) op::call<SrAdvance>({.sr_state = {s.sr_state.tensor}});
  if (quantizes && s.bwd_scale.defined()) collect_amax(s, g[5], 0);
  if (apart) weight_gradient(s, {g[3], g[4], g[5]}, x, as_matrix(dy).sym_size(0));
  if (need[kX] && s.recipe->dx) g[0] = rounded_dx(s, g[0]);
  return {g[0], apart ? delivered(s, dy) : g[1], g[2], {}, {}, {}, {}, {}, {}};
}

}  // namespace quire_torch
