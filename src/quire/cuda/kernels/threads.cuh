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

}  // namespace quire::cuda
