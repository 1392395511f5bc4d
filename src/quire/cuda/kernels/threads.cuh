// How the threads of a launch share work.
#pragma once

#include <cstdint>

namespace quire::cuda {

__device__ inline int64_t thread() { return int64_t{blockIdx.x} * blockDim.x + threadIdx.x; }
__device__ inline int64_t threads() { return int64_t{gridDim.x} * blockDim.x; }

/// Calls each(i) with this thread's ones of `count`. The result must not depend on who takes which.
template <class Each>
__device__ void each_of(int64_t count, Each&& each) {
  for (int64_t i = thread(); i < count; i += threads()) each(i);
}

/// Lanes of a warp.
inline constexpr int kWarp = 32;
inline constexpr unsigned kAllLanes = ~0u;

__device__ inline int lane() { return static_cast<int>(threadIdx.x) % kWarp; }

/// Calls each(i) with this warp's ones of `count`, in all of its lanes. Blocks have whole warps.
template <class Each>
__device__ void each_of_warps(int64_t count, Each&& each) {
  for (int64_t i = thread() / kWarp; i < count; i += threads() / kWarp) each(i);
}

/// The sum of `mine` of this lane and those before it.
__device__ inline int64_t sum_in_warp(int64_t mine) {
  for (int by = 1; by < kWarp; by *= 2) {
    const int64_t other = __shfl_up_sync(kAllLanes, mine, by);
    if (lane() >= by) mine += other;
  }
  return mine;
}

/// Of threads of a block that has whole warps, all of which call it.
struct SumInBlock {
  int64_t before;  ///< the sum of the threads before this one
  int64_t all;

  __device__ explicit SumInBlock(int64_t mine) : before(sum_in_warp(mine)), all(0) {
    __shared__ int64_t of_warps[kWarp];
    const int warp = static_cast<int>(threadIdx.x) / kWarp, warps = static_cast<int>(blockDim.x) / kWarp;
    __syncthreads();  // the sums of the call before have been read
    if (lane() == kWarp - 1) of_warps[warp] = before;
    __syncthreads();
    before -= mine;
    for (int w = 0; w < warps; ++w) {
      if (w < warp) before += of_warps[w];
      all += of_warps[w];
    }
  }
};

}  // namespace quire::cuda
