// What kernels of groups share.
#pragma once

#include "quire/cuda/kernels/groups.h"

namespace quire::cuda {

/// Integers::operator[] of the host.
__device__ inline int64_t at(const Integers& integers, int64_t i) {
  return integers.wide ? static_cast<const int64_t*>(integers.data)[i] : static_cast<const int32_t*>(integers.data)[i];
}

/// The end of a group, as it was given.
__device__ inline int64_t end_of(const RowGroups& groups, int64_t group, int64_t rows) {
  return groups.ends.data ? at(groups.ends, group) : (group + 1) * (rows / groups.count);
}

/// Whether a group has rows of `only`, or `only` has no ends (QuantizeProblem::only).
__device__ inline bool is_wanted(const RowGroups& only, int64_t group) {
  if (!only.ends.data) return true;
  return end_of(only, group, only.rows) > (group == 0 ? 0 : end_of(only, group - 1, only.rows));
}

/// Calls each(group, place) for the groups of this block of threads: blockIdx.y counts them (with_groups() of the
/// host).
template <class Each>
__device__ void each_group(const Places& groups, Each&& each) {
  for (int64_t e = blockIdx.y; e < groups.count; e += gridDim.y) each(e, groups[e]);
}

/// The rows of a group.
template <class AnyMatrix>
__device__ AnyMatrix matrix_of(AnyMatrix m, const GroupPlace& place) {
  if (m.data)
    m.data = reinterpret_cast<decltype(m.data)>(reinterpret_cast<uintptr_t>(m.data) +
                                                static_cast<uintptr_t>(place.begin * m.row_stride * size_of(m.dtype)));
  m.rows = place.rows;
  return m;
}

/// The matrix of a group: one of a list, if there is one.
__device__ inline Matrix group_matrix(const Matrix& x, const Matrix* each, int64_t group, const GroupPlace& place) {
  return each ? each[group] : matrix_of(x, place);
}

}  // namespace quire::cuda
