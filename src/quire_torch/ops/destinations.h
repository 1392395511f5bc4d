// What the backward pass of a linear writes besides the gradients that it returns.
#pragma once

#include <array>

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

}  // namespace quire_torch
