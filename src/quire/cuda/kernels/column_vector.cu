// Sums of chunks of columns, two columns a thread: the same sums as those of pointwise.cu, in the same order.
#include "quire/cuda/kernels/pointwise.h"

#include "quire/cuda/kernels/groups.cuh"
#include "quire/cuda/kernels/vectors.cuh"

using namespace quire;
using namespace quire::cuda;

namespace {

/// Columns of a block, each of whose threads has two.
__device__ int64_t block_columns() { return 2 * int64_t{blockDim.x}; }

/// Numbers of two neighbouring columns.
struct Pair {
  float2 v;

  __device__ Pair& operator+=(const Pair& other) {
    v.x += other.v.x, v.y += other.v.y;
    return *this;
  }
};

/// Terms of dgamma and of dbeta.
struct GammaPair {
  Pair gamma, beta;

  __device__ GammaPair& operator+=(const GammaPair& other) {
    gamma += other.gamma, beta += other.beta;
    return *this;
  }
};

template <DType D>
__device__ float2 load_pair(const Matrix& m, int64_t row, int64_t col) {
  const int64_t index = row * m.row_stride + col;
  if constexpr (D == DType::f32) return *reinterpret_cast<const float2*>(static_cast<const float*>(m.data) + index);
  return numbers_of(*reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(m.data) + index), D);
}

__device__ void store_pair(float* sums, int64_t at, const Pair& pair) {
  if (sums) *reinterpret_cast<float2*>(sums + at) = pair.v;
}

/// Calls each(line, col, chunk, place) with this block's chunks of columns of all groups, in all of its threads: col is
/// the first of the thread's columns, which may lie beyond the last one.
template <class Each>
__device__ void each_chunk_of_block(const ChunkLines& lines, Each&& each) {
  const int64_t width = block_columns(), blocks = (lines.cols + width - 1) / width;
  for (int64_t at = blockIdx.x; at < lines.count() * blocks; at += gridDim.x) {
    const int64_t line = at / blocks, col = at % blocks * width + 2 * int64_t{threadIdx.x};
    const int64_t group = lines.group_of(line);
    const GroupPlace place = lines.groups[group];
    const int64_t chunk = line - ChunkLines::first(place, group);
    if (chunk < column_chunks(place.rows)) each(line, col, chunk, place);
  }
}

template <DType D>
__device__ void gamma_chunks_of(const GammaJob& job) {
  const NormGradProblem& p = job.problem;
  __shared__ RowMoments moments[kColumnChunk];
  each_chunk_of_block(job.lines, [&](int64_t line, int64_t col, int64_t chunk, const GroupPlace& place) {
    const int64_t begin = chunk * kColumnChunk;
    __syncthreads();  // those of the chunk before have been read
    for (int64_t i = threadIdx.x; i < kColumnChunk && begin + i < place.rows; i += blockDim.x)
      moments[i] = moments_of(p, begin + i);
    __syncthreads();
    if (col >= job.lines.cols) return;
    const auto sum = sum_of_chunk<GammaPair>(chunk, place.rows, [&](int64_t row) {
      const float2 dy = load_pair<D>(p.dy, row, col), x = load_pair<D>(p.x, row, col);
      const RowMoments& m = moments[row - begin];
      return GammaPair{{{gamma_term_of(dy.x, x.x, m), gamma_term_of(dy.y, x.y, m)}}, {dy}};
    });
    const int64_t to = line * job.lines.cols + col;
    store_pair(job.gamma_chunks, to, sum.gamma);
    store_pair(job.beta_chunks, to, sum.beta);
  });
}

}  // namespace

extern "C" {

__global__ void gamma_chunks_vector(const __grid_constant__ GammaJob job) {
  with_dtype(job.problem.x.dtype, [&](auto d) { gamma_chunks_of<d>(job); });
}

__global__ void column_chunks_vector(const __grid_constant__ ColumnSumJob job) {
  with_dtype(job.x.dtype, [&](auto d) {
    each_chunk_of_block(job.lines, [&](int64_t line, int64_t col, int64_t chunk, const GroupPlace& place) {
      if (col >= job.lines.cols) return;
      const auto sum = sum_of_chunk<Pair>(
          chunk, place.rows, [&](int64_t row) { return Pair{load_pair<d>(job.x, place.begin + row, col)}; });
      store_pair(job.chunks, line * job.lines.cols + col, sum);
    });
  });
}

}  // extern "C"
