// Norms, activations and their gradients by accesses of 16 bytes. The bits are those of pointwise.cu: the formulas are
// the same ones, and so is the order of sums.
#include "quire/cuda/kernels/pointwise_vector.h"

#include "quire/cuda/kernels/vectors.cuh"
#include "quire/spec/curve.h"

using namespace quire;
using namespace quire::cuda;

namespace {

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

/// The n-th matrix of this warp's rows in shared memory.
template <DType D>
__device__ MutableMatrix warp_rows(const RowMemory& memory, int64_t cols, int n) {
  const int64_t bytes = kWarpRows * memory.stride * size_of(D);
  const int64_t before = n * memory.warps + threadIdx.x / 32;
  return {reinterpret_cast<char*>(shared_memory) + before * bytes, D, kWarpRows, cols, memory.stride};
}

/// Copies rows from `first` on; past the last one it is taken again.
template <DType D>
__device__ void copy_rows(const Matrix& x, int64_t first, const MutableMatrix& to) {
  const int64_t words = x.cols * size_of(D) / 16;
  for (int64_t i = 0; i < kWarpRows; ++i) {
    const int64_t row = first + i < x.rows ? first + i : x.rows - 1;
    const auto* const from =
        reinterpret_cast<const uint4*>(static_cast<const char*>(x.data) + row * x.row_stride * size_of(D));
    auto* const at = reinterpret_cast<uint4*>(static_cast<char*>(to.data) + i * to.row_stride * size_of(D));
#pragma unroll 4
    for (int64_t w = threadIdx.x % 32; w < words; w += 32) at[w] = from[w];
  }
}

/// Gains of columns [col, col + 8).
__device__ Floats gains_at(const Vector& gamma, bool zero_centered, int64_t col) {
  const Floats g = load_vector(gamma.data, gamma.dtype, col);
  return made_vector([&](int i) { return zero_centered ? g.v[i] + 1.0f : g.v[i]; });
}

template <DType D>
__device__ void norm_rows_of(const NormVectorJob& job) {
  const NormProblem& p = job.problem;
  const Lane lane;
  NormProblem staged = p;
  const MutableMatrix rows = warp_rows<D>(job.memory, p.x.cols, 0);
  staged.x = rows;
  each_pair_of_rows(p.x.rows, job.memory, [&](int64_t first) {
    copy_rows<D>(p.x, first, rows);
    __syncwarp();
    const RowMoments m = moments_of(staged, lane.half, lane.sum());
    const int64_t row = first + lane.half;
    if (row < p.x.rows) {
      if (lane.of_row == 0 && p.mean) p.mean[row] = m.mean;
      if (lane.of_row == 0 && p.rstd) p.rstd[row] = m.rstd;
      MutableMatrix y = p.out.y;
      y.dtype = D;
      for (int64_t col = lane.of_row * kVector; y.data && col < y.cols; col += 16 * kVector) {
        const Floats x = load_vector(staged.x, lane.half, col), gain = gains_at(p.gamma, p.zero_centered, col);
        Floats out = made_vector([&](int i) { return normalized_of(x.v[i], m) * gain.v[i]; });
        if (p.beta.data) {
          const Floats beta = load_vector(p.beta.data, p.beta.dtype, col);
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
  staged.dy = dy, staged.x = x;
  each_pair_of_rows(p.x.rows, job.memory, [&](int64_t first) {
    copy_rows<D>(p.dy, first, dy);
    copy_rows<D>(p.x, first, x);
    __syncwarp();
    const int64_t row = first + lane.half;
    const RowMoments m = moments_of(p, row < p.x.rows ? row : first);
    const GradMeans means = grad_means(staged, m, lane.half, lane.sum());
    MutableMatrix dx = p.dx;
    dx.dtype = D;
    for (int64_t col = lane.of_row * kVector; row < p.x.rows && col < dx.cols; col += 16 * kVector) {
      const Floats d = load_vector(staged.dy, lane.half, col), v = load_vector(staged.x, lane.half, col);
      const Floats gain = gains_at(p.gamma, p.zero_centered, col);
      store_vector(dx, row, col,
                   made_vector([&](int i) { return grad_of(d.v[i] * gain.v[i], normalized_of(v.v[i], m), m, means); }));
    }
    __syncwarp();
  });
}

/// Calls each(row, col) for this thread's vectors of [rows, cols], fewer than 2^31.
template <class Each>
__device__ void each_vector(int64_t rows, int64_t cols, Each&& each) {
  const auto of_row = static_cast<uint32_t>(cols / kVector), count = static_cast<uint32_t>(rows) * of_row;
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
    each(int64_t{i / of_row}, int64_t{i % of_row} * kVector);
}

/// each(point, i) for the elements of a vector of an activation's result.
template <class Each>
__device__ void each_point(const Activation& a, const Matrix& from, int64_t row, int64_t col, const Each& each) {
  const ActivationRow kind = a.row();
  const Floats x = load_vector(from, row, col);
  Floats up = made_vector([](int) { return 1.0f; });
  if (kind.gated) up = load_vector(from, row, from.cols / 2 + col);
  with_curve(kind.curve, [&](auto curve) {
    QUIRE_UNROLL
    for (int i = 0; i < kVector; ++i)
      each(activation_of(kind, a, x.v[i], up.v[i], [&](float v) { return curve_at<curve>(v, a.alpha); }), i);
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

__global__ void activation_vector(const __grid_constant__ ActivationJob job) {
  const int64_t rows = job.groups.places ? job.groups[job.groups.count].begin : job.y.rows;
  each_vector(rows, job.y.cols, [&](int64_t row, int64_t col) {
    Floats y;
    each_point(job.activation, job.x, row, col, [&](const ActivationPoint& at, int i) { y.v[i] = at.value(); });
    store_vector(job.y, row, col, y);
  });
}

__global__ void activation_grad_vector(const __grid_constant__ ActivationGradProblem p) {
  each_vector(p.dy.rows, p.dy.cols, [&](int64_t row, int64_t col) {
    const Floats dy = load_vector(p.dy, row, col);
    Floats of_x, of_up;
    each_point(p.activation, p.x, row, col, [&](const ActivationPoint& at, int i) {
      of_x.v[i] = at.x_grad(dy.v[i]), of_up.v[i] = at.up_grad(dy.v[i]);
    });
    store_vector(p.dx, row, col, of_x);
    if (p.activation.row().gated) store_vector(p.dx, row, p.dy.cols + col, of_up);
  });
}

}  // extern "C"
