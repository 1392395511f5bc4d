// Asynchronous copies from global to shared memory, which every GPU from sm_80 has.
#pragma once

#include <cstdint>

namespace quire::cuda {

/// Copies 16 bytes to shared memory, or, unless they are `there`, writes zeros and reads nothing.
__device__ inline void copy_or_zero(uint32_t to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

/// Ends a group of this thread's copies, which may be empty.
__device__ inline void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until all groups of this thread's copies but the last kLeft have arrived. Others see them after a barrier.
template <int kLeft>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

}  // namespace quire::cuda
