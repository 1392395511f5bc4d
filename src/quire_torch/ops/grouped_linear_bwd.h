// Steps of the backward pass of linears, and where its gradients go besides autograd; also for those that take these
// steps in an order of their own (parallel_bwd.cpp).
#pragma once

#include "quire_torch/ops/grouped_linear.h"

namespace quire_torch {

/// What linear_bwd is given for these gradients. x: columnwise codes, which dw reads.
LinearBwd::Args quantized_arguments(const GroupedLinear::Saved& s, const at::Tensor& dy, const DirectionBuffers& x,
                                    op::Needs need);
/// What linear_unquantized_bwd is given, but for x.
LinearUnquantizedBwd::Args unquantized_arguments(const GroupedLinear::Saved& s, const at::Tensor& dy, op::Needs need);

/// The values [*, K] of rowwise codes, of as many rows as `like` has.
at::Tensor decode(const GroupedLinear::Saved& s, const DirectionBuffers& codes, const quire::QuantSpec& spec,
                  const at::Tensor& like);
/// The scale that dx is rounded with under delayed scaling.
op::OptionalTensor scale_of_dx(const GroupedLinear::Saved& s);
/// dx, dw and dbias as autograd takes them: what one group has in place of a list has no dimension of groups.
op::Tensors<3> as_lists(const GroupedLinear::Saved& s, op::Tensors<3> gradients, op::Needs need);

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
