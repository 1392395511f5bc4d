// Eight neighbouring numbers of a row, which a thread has in float32.
#pragma once

#include "quire/cuda/kernels/bf16_codes.cuh"
#include "quire/cuda/kernels/pairs.cuh"

namespace quire::cuda {

/// kUnit numbers that follow each other in a row.
struct UnitValues {
  float v[kUnit];

  /// Rounded to the dtype of a product's result, as operands are.
  __device__ UnitValues in(DType dtype) const {
    UnitValues out;
#pragma unroll
    for (int k = 0; k < kUnit; ++k) out.v[k] = rounded(dtype, v[k]);
    return out;
  }

  template <DType kDType>
  __device__ uint4 pairs() const {
    return {pair_of<kDType>(v[0], v[1]), pair_of<kDType>(v[2], v[3]), pair_of<kDType>(v[4], v[5]),
            pair_of<kDType>(v[6], v[7])};
  }
};

/// Where numbers of a row are stored, if they are one or two vectors there: null if not.
__device__ inline uint4* vectors_of(const MutableMatrix& out, int64_t row, int64_t col) {
  auto* const at = static_cast<unsigned char*>(out.data) + (row * out.row_stride + col) * size_of(out.dtype);
  if (col + kUnit > out.cols || reinterpret_cast<uintptr_t>(at) % 16 != 0) return nullptr;
  return reinterpret_cast<uint4*>(at);
}

/// Stores numbers there, each rounded once to the dtype.
__device__ inline void store_vectors(uint4* to, DType dtype, const UnitValues& u) {
  if (dtype == DType::bf16) {
    *to = u.pairs<DType::bf16>();
  } else if (dtype == DType::f16) {
    *to = u.pairs<DType::f16>();
  } else {
#pragma unroll
    for (int k = 0; k < kUnit; k += 4)
      to[k / 4] = {std::bit_cast<uint32_t>(u.v[k]), std::bit_cast<uint32_t>(u.v[k + 1]),
                   std::bit_cast<uint32_t>(u.v[k + 2]), std::bit_cast<uint32_t>(u.v[k + 3])};
  }
}

}  // namespace quire::cuda
