// Small problems with known data, and the comparison of what two rows made of them.
#include "quire/cuda/kernels/self_check.h"

#include "quire/cuda/kernels/threads.cuh"
#include "quire/format/element.h"

using namespace quire;
using namespace quire::cuda;

namespace {

/// A mantissa with all bits of a float32, times 2^-20 to 2^-23.
__device__ float drawn(const DrawJob& job, int64_t i) {
  const uint64_t bits = mixed(job.seed, static_cast<uint64_t>(i));
  const int signed_mantissa = static_cast<int>(bits & 0xFFFFFF) - (1 << 23), magnitude = abs(signed_mantissa);
  const int mantissa = job.positive ? (magnitude == 0 ? 1 : magnitude) : signed_mantissa;
  return static_cast<float>(mantissa) / static_cast<float>((1 << 20) << (bits >> 24 & 3));
}

/// Half a unit in the last place of a number, relative to it, at most.
__device__ float rounding_of(DType dtype) {
  return dtype == DType::f16 ? 0x1p-11f : dtype == DType::bf16 ? 0x1p-8f : 0x1p-24f;
}

__device__ bool differs(const DifferJob& job, int64_t i) {
  if (job.dtype == DType::u8)
    return static_cast<const uint8_t*>(job.found)[i] != static_cast<const uint8_t*>(job.expected)[i];
  const float found = load_element(job.found, job.dtype, i), expected = load_element(job.expected, job.dtype, i);
  const float roundings = 2 * rounding_of(job.dtype) * (fabsf(found) + fabsf(expected) + job.offset);
  return !(fabsf(found - expected) <= job.tolerance * job.magnitudes[i] + roundings);
}

}  // namespace

extern "C" {

__global__ void draw_values(const __grid_constant__ DrawJob job) {
  each_of(job.count, [&](int64_t i) { store_element(job.to, job.dtype, i, drawn(job, i)); });
}

__global__ void draw_ids(const __grid_constant__ DrawIdsJob job) {
  each_of(job.count, [&](int64_t i) {
    const int64_t token = i / job.slots;
    const uint64_t first = mixed(1, static_cast<uint64_t>(token)) % static_cast<uint64_t>(job.experts);
    job.to[i] = static_cast<int32_t>((static_cast<int64_t>(first) + i - token * job.slots) % job.experts);
  });
}

__global__ void draw_ends(const __grid_constant__ DrawEndsJob job) {
  each_of(job.count, [&](int64_t i) {
    if (job.wide)
      static_cast<int64_t*>(job.to)[i] = (i + 1) * job.step;
    else
      static_cast<int32_t*>(job.to)[i] = static_cast<int32_t>((i + 1) * job.step);
  });
}

__global__ void clear_bits(const __grid_constant__ ClearJob job) {
  each_of(job.count, [&](int64_t i) { job.bytes[i] &= job.keep; });
}

__global__ void count_differing(const __grid_constant__ DifferJob job) {
  uint32_t found = 0;
  each_of(job.count, [&](int64_t i) { found += differs(job, i); });
  if (found) atomicAdd(job.differing, found);
}

}  // extern "C"
