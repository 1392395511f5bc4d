// Accesses of 16 bytes, and sums that the lanes of a warp share.
#pragma once

#include <type_traits>

#include "quire/base/matrix.h"
#include "quire/cuda/kernels/pairs.cuh"
#include "quire/cuda/kernels/vector.h"
#include "quire/format/element.h"
#include "quire/spec/sums.h"

namespace quire::cuda {

/// body(dtype as an integral_constant), of one that is floating.
template <class Body>
__device__ void with_dtype(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::f16:
      return body(std::integral_constant<DType, DType::f16>());
    case DType::bf16:
      return body(std::integral_constant<DType, DType::bf16>());
    default:
      return body(std::integral_constant<DType, DType::f32>());
  }
}

/// A vector: in memory 16 or 32 bytes, aligned to 16.
struct Floats {
  float v[kVector];
};

/// The numbers of a pair (pairs.cuh) of such a dtype.
__device__ inline float2 numbers_of(uint32_t both, DType dtype) {
  if (dtype == DType::bf16) return {__uint_as_float(both << 16), __uint_as_float(both & 0xFFFF0000u)};
  float2 out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out.x) : "h"(static_cast<uint16_t>(both)));
  asm("cvt.f32.f16 %0, %1;" : "=f"(out.y) : "h"(static_cast<uint16_t>(both >> 16)));
  return out;
}

__device__ inline Floats load_vector(const void* data, DType dtype, int64_t index) {
  Floats out;
  if (dtype == DType::f32) {
    const auto* const from = reinterpret_cast<const float4*>(static_cast<const float*>(data) + index);
    const float4 low = from[0], high = from[1];
    return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
  }
  const uint4 bits = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(data) + index);
  const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
  QUIRE_UNROLL
  for (int i = 0; i < 4; ++i) {
    const float2 both = numbers_of(words[i], dtype);
    out.v[2 * i] = both.x, out.v[2 * i + 1] = both.y;
  }
  return out;
}

__device__ inline void store_vector(void* data, DType dtype, int64_t index, const Floats& values) {
  const auto& v = values.v;
  if (dtype == DType::f32) {
    auto* const to = reinterpret_cast<float4*>(static_cast<float*>(data) + index);
    to[0] = {v[0], v[1], v[2], v[3]}, to[1] = {v[4], v[5], v[6], v[7]};
    return;
  }
  uint32_t words[4];
  QUIRE_UNROLL
  for (int i = 0; i < 4; ++i)
    words[i] = dtype == DType::f16 ? pair_of<DType::f16>(v[2 * i], v[2 * i + 1])
                                   : pair_of<DType::bf16>(v[2 * i], v[2 * i + 1]);
  *reinterpret_cast<uint4*>(static_cast<uint16_t*>(data) + index) = {words[0], words[1], words[2], words[3]};
}

__device__ inline Floats load_vector(const Matrix& m, int64_t row, int64_t col) {
  return load_vector(m.data, m.dtype, row * m.row_stride + col);
}
__device__ inline void store_vector(const MutableMatrix& m, int64_t row, int64_t col, const Floats& values) {
  store_vector(m.data, m.dtype, row * m.row_stride + col, values);
}

/// each(value, i) for the values of a vector.
template <class Each>
__device__ Floats made_vector(const Each& each) {
  Floats out;
  QUIRE_UNROLL
  for (int i = 0; i < kVector; ++i) out.v[i] = each(i);
  return out;
}

/// SumOfRow by 16 lanes of a warp, each of which has one of the partial sums; all get the sum. The other 16 lanes call
/// it at the same time, for a row of their own.
struct SumOfLanes {
  int lane;  ///< of the 16

  template <class Term>
  __device__ float operator()(int64_t count, const Term& term) const {
    float sum = 0;
#pragma unroll 8
    for (int64_t j = lane; j < count; j += kRowSums) sum += term(j);
    QUIRE_UNROLL
    for (int half = 8; half > 0; half /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, half);
    return sum;
  }
};

}  // namespace quire::cuda
