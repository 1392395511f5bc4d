// Products. The references: a thread for each output, which sums in double as the CPU's do.
#include "quire/cuda/kernels/plain.cuh"
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
  each_plain_product(job, [&](const OnePlainProduct& p) {
    const DType dtype = p.to.out.dtype;
    const PlainValues a{p.a.m, p.a.across, dtype};
    if (p.b.has_codes)
      multiply(p.to, a, CodeValues{decoded(p.b.codes), !p.b.across, dtype}, p.contraction);
    else
      multiply(p.to, a, PlainValues{p.b.m, !p.b.across, dtype}, p.contraction);
  });
}

}  // extern "C"
