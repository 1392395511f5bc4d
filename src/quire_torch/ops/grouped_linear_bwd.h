// Steps of the backward pass of linears, for those that take them in an order of their own (parallel_bwd.cpp).
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

}  // namespace quire_torch
