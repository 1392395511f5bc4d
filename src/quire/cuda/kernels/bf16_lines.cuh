// Where the decoded numbers of a group lie.
#pragma once

#include "quire/cuda/kernels/bf16_lines.h"
#include "quire/cuda/kernels/gemm.cuh"

namespace quire::cuda {

/// The lines of a group, of an operand that was decoded from `from`.
__device__ inline Bf16Lines group_of(const Bf16Lines& all, const GroupedOperand& from, int64_t e) {
  if (!from.groups.places) return all;
  const int64_t begin = from.groups[e].begin;
  return {all.data + (from.all.direction == Direction::rowwise ? begin * all.row_bytes : bf16_group(e, begin) * 2),
          all.row_bytes};
}

}  // namespace quire::cuda
