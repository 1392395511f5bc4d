// What the backward pass of a linear writes besides the gradients that it returns.
#pragma once

#include <array>

#include "quire_torch/ops/grouped_linear.h"
#include "quire_torch/ops/state.h"

namespace quire_torch {

/// A saved tensor that may be absent, which is undefined then.
inline op::OptionalTensor given(const at::Tensor& saved) {
  return saved.defined() ? op::OptionalTensor(saved) : std::nullopt;
}

/// Each may be absent. Forward checks them, since a refusal in backward would come after others of its writes.
struct Destinations {
  op::OptionalTensor sr_state, bwd_scale, bwd_amax, wgrad_stash;
  const op::TensorList& main_grad;

  /// What backward checks once more when it begins, since it may have been resized.
  static Destinations of(const GroupedLinear::Saved& s) {
    return {given(s.sr_state.tensor), std::nullopt, given(s.bwd_amax.tensor), given(s.wgrad_stash.tensor),
            s.main_grad.tensors};
  }
  /// Throws unless each fits `groups` linears whose weights have these sizes [N, K], and lies where they compute (the
  /// stash: on the host).
  void check(at::Device device, const c10::SymInt& groups, const std::array<c10::SymInt, 2>& weight) const;
};

/// Throws unless the memory for dx, where a caller gave some, still fits it.
void check_dgrad_out(const GroupedLinear::Saved& s, const at::Tensor& dy);

/// Whether dw goes to main_grad or to the stash, and not to autograd.
inline bool goes_elsewhere(const GroupedLinear::Saved& s) {
  return !s.main_grad.tensors.empty() || s.wgrad_stash.tensor.defined();
}

/// Puts dw there. Returns what autograd is given for w in its place: nothing, or zeros. found: the results of
/// linear_bwd (kKeepsDy). tokens: rows that dw sums over.
at::Tensor put_elsewhere(const GroupedLinear::Saved& s, const LinearBwd::Args& args, const op::Tensors<6>& found,
                         c10::SymInt tokens);
/// The same of dw, a result of linear_unquantized_bwd.
at::Tensor put_elsewhere(const GroupedLinear::Saved& s, const LinearUnquantizedBwd::Args& args, const at::Tensor& dw);

}  // namespace quire_torch
