// Kernels over the headers of the core, one for each of their rules: what nvcc makes of them gives the bytes of the
// CPU.
#include "cuda/kernels.h"

#include "quire/cuda/kernels/quantize.cuh"

using namespace quire;
using namespace quire::cuda;
using namespace quire::testing;

namespace {

/// The reference, compiled for one spec.
template <QuantSpec kSpec>
__device__ void quantize_known(const QuantizeJob& job) {
  quantize_as(kSpec, job);
}

}  // namespace

extern "C" {

__global__ void quantize_mxfp8(const __grid_constant__ QuantizeJob job) { quantize_known<QuantSpec{}>(job); }

__global__ void quantize_fp8_block_pow2_nan(const __grid_constant__ QuantizeJob job) {
  quantize_known<QuantSpec{.family = Family::fp8_block, .pow2 = true, .nan = true}>(job);
}

__global__ void quantize_nvfp4_rht_sr_swizzled(const __grid_constant__ QuantizeJob job) {
  constexpr QuantSpec spec{.family = Family::nvfp4,
                           .element = Format::e2m1,
                           .hadamard = Hadamard::signs,
                           .stochastic = true,
                           .swizzled = true};
  quantize_known<spec>(job);
}

__global__ void curves(const __grid_constant__ CurveJob job) {
  each_of(job.count, [&](int64_t i) { job.points[i] = point_of(job.activation, job.x[i]); });
}

__global__ void convert(const __grid_constant__ ConversionJob job) {
  each_of(job.count, [&](int64_t i) { job.results[i] = conversions_of(job.x[i]); });
}

__global__ void update_delayed(const __grid_constant__ DelayedJob job) {
  each_of(job.count, [&](int64_t i) {
    const AmaxHistory history{job.history + i, job.length, job.count};
    job.scale[i] = delayed_update(job.rule, history, 0, job.scale[i]);
  });
}

}  // extern "C"
