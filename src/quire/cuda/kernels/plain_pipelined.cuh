// Plain products of matrices of one dtype of 16 bits, of one tensor or of groups, by the pipeline of
// pipelined_product.cuh.
#pragma once

#include "quire/cuda/kernels/group_tiles.cuh"
#include "quire/cuda/kernels/pipelined_product.cuh"
#include "quire/cuda/kernels/plain.cuh"

namespace quire::cuda {

/// Sums of neighbouring outputs of a row of a plain product, from a column on that is a multiple of kUnit.
__device__ inline void store_plain_unit(const ProductOutput& to, int64_t row, int64_t col, UnitValues sums) {
  const MutableMatrix& out = to.out;
  if (row >= out.rows || col >= out.cols) return;
  uint4* const vectors = vectors_of(out, row, col);
  if (!vectors) {
#pragma unroll
    for (int k = 0; k < kUnit; ++k)
      if (col + k < out.cols) store_plain(to, row, col + k, sums.v[k]);
    return;
  }
  if (to.bias.data) {
#pragma unroll
    for (int k = 0; k < kUnit; ++k) sums.v[k] += rounded(out.dtype, load_element(to.bias.data, to.bias.dtype, col + k));
  }
  store_vectors(vectors, out.dtype, sums);
}

template <bool kAcross>
__device__ PipelinedOperand pipelined(const Matrix& m) {
  return {static_cast<const unsigned char*>(m.data), m.row_stride * 2, kAcross ? m.cols : m.rows};
}

/// The tiles of this block, of every product of a job. kAcrossA is the job's transpose_a, and kAcrossB not its
/// transpose_b.
template <DType kNumber, int kCols, bool kAcrossA, bool kAcrossB>
__device__ void multiply_pipelined(const MatmulJob& job) {
  extern __shared__ __align__(128) unsigned char memory[];
  Pipeline<kNumber, kCols, kAcrossA, kAcrossB> pipeline(memory);
  GroupTiles<kPipelinedRows, kCols> tiles(job.groups, job.out.all.cols, kAcrossA ? job.a.cols : -1);
  int64_t t = blockIdx.x;
  const auto begin = [&] {
    if (!tiles.find(t)) return false;
    const GroupPlace place = job.groups[tiles.group];
    pipeline.begin(pipelined<kAcrossA>(matrix_of(job.a, place)), tiles.row,
                   pipelined<kAcrossB>(matrix_b_of(job, tiles.group, place)), tiles.col,
                   kAcrossA ? place.rows : job.a.cols);
    t += gridDim.x;
    return true;
  };
  for (bool more = begin(); more;) {
    pipeline.multiply();
    const int64_t group = tiles.group, row = tiles.row, col = tiles.col;
    more = begin();
    const GroupPlace place = job.groups[group];
    const ProductOutput to = output_of(job.out, group, place, kAcrossA ? job.a.cols : place.rows);
    pipeline.store(
        [&](int down, int across, const UnitValues& sums) { store_plain_unit(to, row + down, col + across, sums); });
  }
}

}  // namespace quire::cuda
