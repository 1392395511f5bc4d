// Norms, activations, their gradients, and sums over rows: the rules of spec/norm.h, spec/curve.h and spec/sums.h.
#include "quire/cuda/kernels/pointwise.h"

#include "quire/cuda/kernels/groups.cuh"
#include "quire/cuda/kernels/threads.cuh"
#include "quire/cuda/kernels/vectors.cuh"
#include "quire/spec/curve.h"

using namespace quire;
using namespace quire::cuda;

namespace {

/// Calls each(row, col) for this thread's elements of [rows, cols].
template <class Each>
__device__ void each_element(int64_t rows, int64_t cols, Each&& each) {
  each_of(rows * cols, [&](int64_t i) { each(i / cols, i % cols); });
}

/// Calls each(line, col, chunk, place) for the chunks of columns of all groups.
template <class Each>
__device__ void each_chunk(const ChunkLines& lines, Each&& each) {
  each_element(lines.count(), lines.cols, [&](int64_t line, int64_t col) {
    const int64_t group = lines.group_of(line);
    const GroupPlace place = lines.groups[group];
    const int64_t chunk = line - ChunkLines::first(place, group);
    if (chunk < column_chunks(place.rows)) each(line, col, chunk, place);
  });
}

/// Stores the sum of each column of each group.
__device__ void add_chunks(const ChunkLines& lines, const float* chunks, void* out, DType dtype) {
  each_element(lines.groups.count, lines.cols, [&](int64_t group, int64_t col) {
    const GroupPlace place = lines.groups[group];
    const float* const first = chunks + ChunkLines::first(place, group) * lines.cols + col;
    const float sum = sum_of_chunks(place.rows, [&](int64_t chunk) { return first[chunk * lines.cols]; });
    store_element(out, dtype, group * lines.cols + col, sum);
  });
}

}  // namespace

extern "C" {

__global__ void norm_moments(const __grid_constant__ NormProblem p) {
  each_of(p.x.rows, [&](int64_t row) {
    const RowMoments m = moments_of(p, row, SumOfRow());
    if (p.mean) p.mean[row] = m.mean;
    p.rstd[row] = m.rstd;
  });
}

__global__ void norm_values(const __grid_constant__ NormProblem p) {
  each_element(p.x.rows, p.x.cols, [&](int64_t row, int64_t col) {
    const RowMoments m{p.kind == NormKind::layer ? p.mean[row] : 0.0f, p.rstd[row]};
    store_element(p.out.y, row, col, norm_value(p, m, row, col));
  });
}

__global__ void norm_grad_rows(const __grid_constant__ NormGradProblem p) {
  each_of(p.x.rows, [&](int64_t row) {
    const RowMoments m = moments_of(p, row);
    const GradMeans means = grad_means(p, m, row, SumOfRow());
    for (int64_t col = 0; col < p.x.cols; ++col)
      store_element(p.dx, row, col, grad_of(gained(p, row, col), normalized(p, m, row, col), m, means));
  });
}

__global__ void gamma_chunks(const __grid_constant__ GammaJob job) {
  with_dtype(job.problem.x.dtype, [&](auto of_x) {
    with_dtype(job.problem.dy.dtype, [&](auto of_dy) {
      NormGradProblem p = job.problem;
      p.x.dtype = of_x, p.dy.dtype = of_dy;
      each_chunk(job.lines, [&](int64_t line, int64_t col, int64_t chunk, const GroupPlace& place) {
        const int64_t to = line * job.lines.cols + col;
        if (job.gamma_chunks)
          job.gamma_chunks[to] = sum_of_chunk(chunk, place.rows, [&](int64_t row) { return gamma_term(p, row, col); });
        if (job.beta_chunks)
          job.beta_chunks[to] =
              sum_of_chunk(chunk, place.rows, [&](int64_t row) { return load_element(p.dy, row, col); });
      });
    });
  });
}

__global__ void gamma_sums(const __grid_constant__ GammaJob job) {
  const NormGradProblem& p = job.problem;
  if (job.gamma_chunks) add_chunks(job.lines, job.gamma_chunks, p.dgamma, p.gamma.dtype);
  if (job.beta_chunks) add_chunks(job.lines, job.beta_chunks, p.dbeta, p.gamma.dtype);
}

__global__ void column_chunks_of(const __grid_constant__ ColumnSumJob job) {
  with_dtype(job.x.dtype, [&](auto dtype) {
    Matrix x = job.x;
    x.dtype = dtype;
    each_chunk(job.lines, [&](int64_t line, int64_t col, int64_t chunk, const GroupPlace& place) {
      job.chunks[line * job.lines.cols + col] =
          sum_of_chunk(chunk, place.rows, [&](int64_t row) { return load_element(x, place.begin + row, col); });
    });
  });
}

__global__ void column_sums(const __grid_constant__ ColumnSumJob job) {
  add_chunks(job.lines, job.chunks, job.out, job.dtype);
}

/// Elements of y, which may take the place of x's first columns: each thread reads what it then writes.
__global__ void activation(const __grid_constant__ ActivationJob job) {
  const int64_t rows = job.groups.places ? job.groups[job.groups.count].begin : job.y.rows;
  each_element(rows, job.y.cols, [&](int64_t row, int64_t col) {
    store_element(job.y, row, col, activation_at(job.activation, job.x, row, col).value());
  });
}

__global__ void activation_grad(const __grid_constant__ ActivationGradProblem p) {
  each_element(p.dy.rows, p.dy.cols, [&](int64_t row, int64_t col) {
    const ActivationPoint at = activation_at(p.activation, p.x, row, col);
    const float dy = load_element(p.dy, row, col);
    store_element(p.dx, row, col, at.x_grad(dy));
    if (at.gated) store_element(p.dx, row, p.dy.cols + col, at.up_grad(dy));
  });
}

}  // extern "C"
