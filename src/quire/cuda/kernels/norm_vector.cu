// Norms and their gradients by accesses of 16 bytes. The bits are those of pointwise.cu: the formulas are the same
// ones, and so is the order of sums.
#include "quire/cuda/kernels/norm_vector.h"

#include "quire/cuda/kernels/copies.cuh"
#include "quire/cuda/kernels/tensor.cuh"
#include "quire/cuda/kernels/vectors.cuh"

using namespace quire;
using namespace quire::cuda;

namespace {

/// The gain of each column in float32, then the rows of each warp.
extern __shared__ uint4 shared_memory[];

/// A thread's place within its warp's rows.
struct Lane {
  int lane, half, of_row;

  __device__ Lane() : lane(static_cast<int>(threadIdx.x) % 32), half(lane / 16), of_row(lane % 16) {}
  __device__ SumOfLanes sum() const { return {of_row}; }
};

/// Calls each(first) with the first of kWarpRows rows for this warp's ones of `rows`.
template <class Each>
__device__ void each_pair_of_rows(int64_t rows, const RowMemory& memory, Each&& each) {
  const int64_t warp = blockIdx.x * memory.warps + threadIdx.x / 32;
  for (int64_t first = warp * kWarpRows; first < rows; first += gridDim.x * memory.warps * kWarpRows) each(first);
}

/// Puts the gains into shared memory, and gives them back as a gamma that is not centered around zero.
__device__ Vector staged_gains(const Vector& gamma, bool zero_centered, int64_t cols) {
  auto* const gains = reinterpret_cast<float*>(shared_memory);
  with_dtype(gamma.dtype, [&](auto d) {
    for (int64_t col = threadIdx.x * kVector; col < cols; col += blockDim.x * kVector) {
      const Floats g = load_vector(gamma.data, d, col);
      store_vector(gains, DType::f32, col, made_vector([&](int i) { return zero_centered ? g.v[i] + 1.0f : g.v[i]; }));
    }
  });
  __syncthreads();
  return {gains, DType::f32};
}

/// The n-th matrix of this warp's rows in shared memory.
template <DType D>
__device__ MutableMatrix warp_rows(const RowMemory& memory, int64_t cols, int n) {
  const int64_t bytes = kWarpRows * memory.stride * size_of(D);
  const int64_t before = n * memory.warps + threadIdx.x / 32;
  char* const rows = reinterpret_cast<char*>(shared_memory) + RowMemory::bytes_of_gains(cols) + before * bytes;
  return {rows, D, kWarpRows, cols, memory.stride};
}

/// Starts to copy rows from `first` on; beyond the last one there are zeros.
template <DType D>
__device__ void copy_rows(const Matrix& x, int64_t first, const MutableMatrix& to) {
  const int64_t words = x.cols * size_of(D) / 16;
  for (int64_t i = 0; i < kWarpRows; ++i) {
    const char* const from = static_cast<const char*>(x.data) + (first + i) * x.row_stride * size_of(D);
    const uint32_t at = in_shared(static_cast<char*>(to.data) + i * to.row_stride * size_of(D));
#pragma unroll 4
    for (int64_t w = threadIdx.x % 32; w < words; w += 32)
      copy_or_zero(at + static_cast<uint32_t>(w) * 16, from + w * 16, first + i < x.rows);
  }
}

/// Waits for the rows that this warp copies.
__device__ void arrive() {
  end_copies();
  wait_for_copies<0>();
  __syncwarp();
}

/// Numbers of columns [col, col + 8).
__device__ Floats vector_at(const Vector& v, int64_t col) {
  Floats out;
  with_dtype(v.dtype, [&](auto d) { out = load_vector(v.data, d, col); });
  return out;
}

template <DType D>
__device__ void norm_rows_of(const NormVectorJob& job) {
  const NormProblem& p = job.problem;
  const Lane lane;
  NormProblem staged = p;
  const MutableMatrix rows = warp_rows<D>(job.memory, p.x.cols, 0);
  staged.gamma = staged_gains(p.gamma, p.zero_centered, p.x.cols), staged.x = rows;
  each_pair_of_rows(p.x.rows, job.memory, [&](int64_t first) {
    copy_rows<D>(p.x, first, rows);
    arrive();
    const RowMoments m = moments_of(staged, lane.half, lane.sum());
    const int64_t row = first + lane.half;
    if (row < p.x.rows) {
      if (lane.of_row == 0 && p.mean) p.mean[row] = m.mean;
      if (lane.of_row == 0 && p.rstd) p.rstd[row] = m.rstd;
      MutableMatrix y = p.out.y;
      y.dtype = D;
      for (int64_t col = lane.of_row * kVector; y.data && col < y.cols; col += 16 * kVector) {
        const Floats x = load_vector(staged.x, lane.half, col), gain = load_vector(staged.gamma.data, DType::f32, col);
        Floats out = made_vector([&](int i) { return normalized_of(x.v[i], m) * gain.v[i]; });
        if (p.beta.data) {
          const Floats beta = vector_at(p.beta, col);
          out = made_vector([&](int i) { return out.v[i] + beta.v[i]; });
        }
        store_vector(y, row, col, out);
      }
    }
    __syncwarp();
  });
}

template <DType D>
__device__ void norm_grad_rows_of(const NormGradVectorJob& job) {
  const NormGradProblem& p = job.problem;
  const Lane lane;
  NormGradProblem staged = p;
  const MutableMatrix dy = warp_rows<D>(job.memory, p.x.cols, 0), x = warp_rows<D>(job.memory, p.x.cols, 1);
  staged.gamma = staged_gains(p.gamma, p.zero_centered, p.x.cols), staged.zero_centered = false;
  staged.dy = dy, staged.x = x;
  each_pair_of_rows(p.x.rows, job.memory, [&](int64_t first) {
    copy_rows<D>(p.dy, first, dy);
    copy_rows<D>(p.x, first, x);
    const int64_t row = first + lane.half;
    const RowMoments m = moments_of(p, row < p.x.rows ? row : first);
    arrive();
    const GradMeans means = grad_means(staged, m, lane.half, lane.sum());
    MutableMatrix dx = p.dx;
    dx.dtype = D;
    for (int64_t col = lane.of_row * kVector; row < p.x.rows && col < dx.cols; col += 16 * kVector) {
      const Floats d = load_vector(staged.dy, lane.half, col), v = load_vector(staged.x, lane.half, col);
      const Floats gain = load_vector(staged.gamma.data, DType::f32, col);
      store_vector(dx, row, col,
                   made_vector([&](int i) { return grad_of(d.v[i] * gain.v[i], normalized_of(v.v[i], m), m, means); }));
    }
    __syncwarp();
  });
}

}  // namespace

extern "C" {

__global__ void norm_vector(const __grid_constant__ NormVectorJob job) {
  with_dtype(job.problem.x.dtype, [&](auto d) { norm_rows_of<d>(job); });
}

__global__ void norm_grad_vector(const __grid_constant__ NormGradVectorJob job) {
  with_dtype(job.problem.x.dtype, [&](auto d) { norm_grad_rows_of<d>(job); });
}

}  // extern "C"
