#include "quire/cuda/kernels/cublaslt.h"

#include "quire/cuda/kernels/threads.cuh"
#include "quire/spec/product.h"

using namespace quire;
using namespace quire::cuda;

extern "C" {

__global__ void arrange_scales(const __grid_constant__ ScalesJob job) {
  const Operand& o = job.from;
  const bool bytes = has_byte_scales(o.spec);
  const int64_t block = o.spec.row().block, blocks = (o.contraction + block - 1) / block;
  const int64_t lines = bytes ? o.outer : (o.outer + block - 1) / block;
  each_of(job.lines * job.entries, [&](int64_t n) {
    const int64_t i = n / job.entries, j = n % job.entries;
    const bool there = i < lines && j < blocks;
    const int64_t from = there ? scale_index({o.spec, o.direction, o.outer, blocks}, bytes ? i : i * block, j) : 0;
    if (bytes)
      static_cast<uint8_t*>(job.to)[swizzled_offset(i, j, blocks)] =
          there ? static_cast<const uint8_t*>(o.scale)[from] : uint8_t{0};
    else
      static_cast<float*>(job.to)[n] = there ? static_cast<const float*>(o.scale)[from] : 0.0f;
  });
}

__global__ void product_factors(const __grid_constant__ FactorsJob job) {
  const float constant = product_constant(job.a.spec, job.b.spec);
  job.to[0] = constant * OperandValues(job.a).line_factor(0) * OperandValues(job.b).line_factor(0);
  job.to[1] = job.has_addend ? 1.0f : 0.0f;
}

}  // extern "C"
