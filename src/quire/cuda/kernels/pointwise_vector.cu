// Activations and their gradients by accesses of 16 bytes. The bits are those of pointwise.cu: the formulas are the
// same ones.
#include "quire/cuda/kernels/pointwise.h"
#include "quire/cuda/kernels/vectors.cuh"
#include "quire/spec/curve.h"

using namespace quire;
using namespace quire::cuda;

namespace {

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
