// Words for code that kernels of a GPU share with the host. A constexpr function needs none of them: nvcc compiles it
// for both (docs/design.md 5).
#pragma once

#ifdef __CUDACC__
/// Of an inline function that cannot be constexpr, as one that casts from void*.
#define QUIRE_HOST_DEVICE __host__ __device__
/// Before a loop of at most 16 steps over an array that must stay in registers.
#define QUIRE_UNROLL _Pragma("unroll")
#else
#define QUIRE_HOST_DEVICE
#define QUIRE_UNROLL _Pragma("GCC unroll 16")
#endif

namespace quire {

/// Whether this is compiled for a GPU.
#ifdef __CUDA_ARCH__
inline constexpr bool kDeviceCode = true;
#else
inline constexpr bool kDeviceCode = false;
#endif

}  // namespace quire
