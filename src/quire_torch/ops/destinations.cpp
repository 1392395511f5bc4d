#include "quire_torch/ops/destinations.h"

#include <ATen/ops/zeros.h>

#include <vector>

#include "quire_torch/bridge/tensor.h"
#include "quire_torch/op/device.h"
#include "quire_torch/ops/wgrad.h"

namespace quire_torch {
namespace {

/// One state of a layer: 1-dimensional, of `size` elements, or not there. name: and what it holds.
void check_vector(const op::OptionalTensor& t, at::ScalarType dtype, const c10::SymInt& size,
                  std::array<const char*, 2> name) {
  if (!t || (t->scalar_type() == dtype && t->dim() == 1 && t->sym_size(0) == size && t->is_contiguous())) return;
  quire::fail("linear: ", name[0], " must be a contiguous ", dtype == at::kLong ? "int64" : "float32", " [", size,
              "] tensor ", name[1], ", got ", t->scalar_type(), " ", t->sym_sizes());
}

/// Throws unless the stash is on the CPU.
void check_on_host(const at::Tensor& stash) {
  quire::check(op::on_host(stash.device()),
               "linear: wgrad_stash must be on the CPU, whichever device computes, got it on ", stash.device(),
               "; move it with .cpu()");
}

/// Throws unless main_grad is a matrix of w's sizes for each group, or one tensor for all of them.
void check_main_grad(const op::TensorList& main_grad, const c10::SymInt& groups,
                     const std::array<c10::SymInt, 2>& weight) {
  if (main_grad.empty()) return;
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

/// Keeps operands of the gradient of w, and offsets behind them if there are any.
void keep_for_later(const GroupedLinear::Saved& s, op::TensorList operands, c10::SymInt tokens) {
  if (s.offsets) operands.push_back(*s.offsets);
  keep_operands({{s.wgrad_stash.tensor}, std::move(operands), std::move(tokens), s.recipe, s.overwrite_main_grad});
}

/// What autograd is given for w when its gradient went elsewhere.
at::Tensor placeholder(const GroupedLinear::Saved& s, const at::Tensor& dy) {
  if (!s.placeholder) return {};
  std::vector<c10::SymInt> sizes{dy.sym_size(-1), s.in_features};
  if (s.offsets) sizes.insert(sizes.begin(), groups_of(s.offsets));
  return at::zeros_symint(sizes, dy.options().dtype(s.dtype));
}

}  // namespace

void Destinations::check(at::Device device, const c10::SymInt& groups, const std::array<c10::SymInt, 2>& weight) const {
  check_vector(sr_state, at::kLong, 2, {"sr_state", "{seed, counter}"});
  check_vector(bwd_scale, at::kFloat, groups * 2, {"bwd_scale", "{dy, dx}"});
  check_vector(bwd_amax, at::kFloat, groups * 2, {"bwd_amax", "{dy, dx}"});
  if (sr_state) check_one_device(sr_state->device(), device, "linear: sr_state and x");
  if (bwd_scale) check_one_device(bwd_scale->device(), device, "linear: bwd_scale and x");
  if (bwd_amax) check_one_device(bwd_amax->device(), device, "linear: bwd_amax and x");
  for (const at::Tensor& t : main_grad) check_one_device(t.device(), device, "linear: main_grad and x");
  check_vector(wgrad_stash, at::kLong, 2, {"wgrad_stash", "{number, count}"});
  if (wgrad_stash) check_on_host(*wgrad_stash);
  check_main_grad(main_grad, groups, weight);
}

void check_dgrad_out(const GroupedLinear::Saved& s, const at::Tensor& dy) {
  const at::Tensor& memory = s.dgrad_out.tensor;
  auto wanted = dy.sym_sizes().vec();
  wanted.back() = s.in_features;
  quire::check(
      memory.is_contiguous() && memory.scalar_type() == s.dtype && memory.sym_numel() == c10::multiply_integers(wanted),
      "linear: dgrad_out was changed since the forward pass and is no memory for ", c10::SymIntArrayRef(wanted),
      " any more");
}

at::Tensor put_elsewhere(const GroupedLinear::Saved& s, const LinearBwd::Args& args, const op::Tensors<6>& found,
                         c10::SymInt tokens) {
  const auto& [dx, dw, dbias, dy_data, dy_scale, dy_amax] = found;
  if (s.wgrad_stash.tensor.defined())
    keep_for_later(s, {dy_data, dy_scale, dy_amax, args.x_data, args.x_scale, args.x_amax}, std::move(tokens));
  else
    call_into<Wgrad>(s.main_grad.tensors, dy_data, dy_scale, dy_amax, args.x_data, args.x_scale, args.x_amax, s.offsets,
                     std::move(tokens), args.recipe, s.overwrite_main_grad);
  return placeholder(s, args.dy);
}

at::Tensor put_elsewhere(const GroupedLinear::Saved& s, const LinearUnquantizedBwd::Args& args, const at::Tensor& dw) {
  if (s.wgrad_stash.tensor.defined())
    keep_for_later(s, {args.dy.to(s.dtype), args.x.to(s.dtype)}, rows_of(args.dy));
  else
    call_into<Accumulate>(s.main_grad.tensors, dw, s.overwrite_main_grad);
  return placeholder(s, args.dy);
}

}  // namespace quire_torch
