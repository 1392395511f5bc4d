// Kernels over the headers of the core, one for each of their rules: what nvcc makes of them gives the bytes of the
// CPU.
#include "cuda/kernels.h"

#include "quire/cuda/kernels/e2m1_codes.cuh"
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

__global__ void encode_e2m1(const __grid_constant__ E2m1Job job) {
  each_of(job.count, [&](int64_t i) {
    E2m1Codes& run = job.runs[i];
    Largest<DType::f32, true> largest;
    for (const float x : run.x) largest.add(std::bit_cast<uint32_t>(x));
    const E2m1Run values(1.0f, largest.of(0), [&](int n) { return run.x[n]; });
    E2m1Run to_round = values, to_draw = values;
    const Nibbles rounded = rounded_codes(to_round);
    const Nibbles drawn = stochastic_codes(to_draw, {run.random[0], run.random[1], run.random[2], run.random[3]});
    for (int w = 0; w < 2; ++w) run.rounded[w] = rounded[w], run.stochastic[w] = drawn[w];
  });
}

__global__ void update_delayed(const __grid_constant__ DelayedJob job) {
  each_of(job.count, [&](int64_t i) {
    const AmaxHistory history{job.history + i, job.length, job.count};
    job.scale[i] = delayed_update(job.rule, history, 0, job.scale[i]);
  });
}

}  // extern "C"
