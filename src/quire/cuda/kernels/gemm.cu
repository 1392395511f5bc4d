// Products. The references: a thread for each output, which sums in double as the CPU's do.
#include "quire/cuda/kernels/gemm.cuh"

#include "quire/spec/block_codes.h"

using namespace quire;
using namespace quire::cuda;

namespace {

/// Codes as an operand of a plain product whose result has `dtype`.
struct CodeValues {
  DequantizeProblem from;
  bool transposed;
  DType dtype;

  __device__ float operator()(int64_t i, int64_t j) const {
    return rounded(dtype, value_of(from, transposed ? j : i, transposed ? i : j));
  }
};

__device__ DequantizeProblem decoded(const Operand& o) {
  return {.spec = o.spec,
          .direction = o.direction,
          .rows = o.outer,
          .cols = o.contraction,
          .data = o.data,
          .scale = o.scale,
          .amax = o.amax,
          .out = {nullptr, DType::f32, o.outer, o.contraction, o.contraction}};
}

/// The matrix of a group of plain ones: rows of all where they are contracted, else one of equal ones.
__device__ Matrix b_of(const MatmulJob& job, int64_t e, const GroupPlace& place) {
  if (job.bs) return job.bs[e];
  if (job.transpose_a) return matrix_of(job.b, place);
  const int64_t rows = job.b.rows / job.groups.count;
  return matrix_of(job.b, GroupPlace{e * rows, rows, {}});
}

template <class B>
__device__ void multiply(const ProductOutput& to, const PlainValues& a, const B& b, int64_t length) {
  each_of(to.out.rows * to.out.cols,
          [&](int64_t n) { store_matmul(to, a, b, length, {n / to.out.cols, n % to.out.cols}); });
}

}  // namespace

extern "C" {

__global__ void gemm_any(const __grid_constant__ GemmJob job) {
  each_product(job, [](const OneProduct& p) {
    const double constant = static_cast<double>(product_constant(p.a.from.spec, p.b.from.spec));
    each_of(p.to.out.rows * p.to.out.cols, [&](int64_t n) {
      const int64_t i = n / p.to.out.cols, j = n % p.to.out.cols;
      p.to.store(i, j, dot(p.a, p.b, i, j) * constant);
    });
  });
}

__global__ void matmul_any(const __grid_constant__ MatmulJob job) {
  const DType dtype = job.out.all.dtype;
  each_group(job.groups, [&](int64_t e, const GroupPlace& place) {
    const ProductOutput to = output_of(job.out, e, place, job.transpose_a ? job.a.cols : place.rows);
    if (job.out.in_groups && place.rows == 0) {
      if (job.transpose_a)
        each_of(to.out.rows * to.out.cols, [&](int64_t n) {
          store_element(to.out.data, dtype, n / to.out.cols * to.out.row_stride + n % to.out.cols, 0.0f);
        });
      return;
    }
    const PlainValues a{matrix_of(job.a, place), job.transpose_a, dtype};
    const int64_t length = job.transpose_a ? place.rows : job.a.cols;
    if (job.has_codes)
      multiply(to, a, CodeValues{decoded(operand_of(job.codes, e, job.codes.groups[e])), job.transpose_b, dtype},
               length);
    else
      multiply(to, a, PlainValues{b_of(job, e, place), job.transpose_b, dtype}, length);
  });
}

}  // extern "C"
