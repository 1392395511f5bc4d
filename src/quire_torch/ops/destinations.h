// What the backward pass of a linear writes besides the gradients that it returns.
#pragma once

#include <array>

#include "quire_torch/ops/grouped_linear.h"
#include "quire_torch/ops/state.h"

namespace quire_torch {

/// Each may be absent. Forward checks them, since a refusal in backward would come after others of its writes.
struct Destinations {
  op::OptionalTensor sr_state, bwd_scale, bwd_amax, wgrad_stash;
  const op::TensorList& main_grad;

  /// Throws unless each fits `groups` linears whose weights have these sizes [N, K], and lies where they compute (the
  /// stash: on the host).
  void check(at::Device device, const c10::SymInt& groups, const std::array<c10::SymInt, 2>& weight) const;
};

/// The same when backward begins: what it writes may have been resized since.
void check_destinations(const GroupedLinear::Saved& s, const at::Tensor& dy);

/// Whether dw goes to main_grad or to the stash, and not to autograd.
bool goes_elsewhere(const GroupedLinear::Saved& s);

/// What autograd is given for w: dw, or where that goes elsewhere, which is done here, nothing or zeros. found: the
/// results of linear_bwd. tokens: rows that dw sums over.
at::Tensor deliver_dw(const GroupedLinear::Saved& s, const LinearBwd::Args& args, const op::Tensors<6>& found,
                      c10::SymInt tokens);
/// The same of dw, a result of linear_unquantized_bwd.
at::Tensor deliver_dw(const GroupedLinear::Saved& s, const LinearUnquantizedBwd::Args& args, const at::Tensor& dw);

/// Advances the random stream that rounded dy, and notes the amax of dy where delayed scaling collects it.
void advance(const GroupedLinear::Saved& s, const LinearBwd::Args& args, const at::Tensor& dy_amax);

}  // namespace quire_torch
