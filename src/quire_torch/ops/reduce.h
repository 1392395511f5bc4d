// The sum over the ranks of a group of what each of them computed from its part of a contraction.
#pragma once

#include <vector>

#include "quire_torch/ops/parallel.h"

namespace quire_torch {

/// The dtype of this rank's part of a result in `dtype`.
inline at::ScalarType partial_dtype(const Parallel& p, at::ScalarType dtype) {
  return p.sums_float32 ? at::kFloat : dtype;
}

/// Starts the sum of `partial` [T, *, N], of all tokens, or of this rank's where `sequence`.
at::Tensor start_sum(const at::Tensor& partial, const Parallel& p);
/// What start_sum() started, plus bias [N] if there is one, in `dtype`. sizes: of the result, [T, *, N], or where
/// `sequence` [T / size, *, N].
at::Tensor wait_for_sum(const at::Tensor& started, const Parallel& p, const std::vector<c10::SymInt>& sizes,
                        at::ScalarType dtype, const op::OptionalTensor& bias = std::nullopt);

}  // namespace quire_torch
