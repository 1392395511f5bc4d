// Kernels that do what a GPU does not tell: test_faults.cpp expects an error of each.
#include <cstdint>

extern "C" {

__global__ void has_a_barrier(const int* x, int* out) {
  __shared__ int values[128];
  values[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = values[127 - threadIdx.x];
}

__global__ void has_no_barrier(const int* x, int* out) {
  __shared__ int values[128];
  values[threadIdx.x] = 0;
  __syncthreads();
  values[threadIdx.x] = x[threadIdx.x];
  out[threadIdx.x] = values[127 - threadIdx.x];
}

__global__ void overwrites_what_others_read(const int* x, int* out) {
  __shared__ int values[128];
  values[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  const int other = values[(threadIdx.x + 1) % 128] + values[(threadIdx.x + 2) % 128];
  values[threadIdx.x] = other;
  __syncthreads();
  out[threadIdx.x] = values[0];
}

/// The barrier is one of 64 threads, but 128 share the memory.
__global__ void has_a_barrier_of_too_few(const int* x, int* out) {
  __shared__ int values[128];
  values[threadIdx.x] = 0;
  __syncthreads();
  values[threadIdx.x] = x[threadIdx.x];
  if (threadIdx.x < 64)
    asm volatile("bar.sync 1, 64;" ::: "memory");
  else
    asm volatile("bar.sync 2, 64;" ::: "memory");
  out[threadIdx.x] = values[127 - threadIdx.x];
}

/// All read after a barrier of their warps, which orders nothing between warps.
__global__ void overwrites_after_a_barrier_of_the_warp(const int* x, int* out) {
  __shared__ int values[2];
  if (threadIdx.x < 2) values[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  __syncwarp();
  const int mine = values[0];
  __syncwarp();
  if (threadIdx.x == 70) values[0] = mine + 1;
  out[threadIdx.x] = mine;
}

/// Neighbours write single bytes, then one writes the word of four of them.
__global__ void writes_bytes_that_others_write(const int* x, int* out) {
  __shared__ __align__(4) char values[128];
  values[threadIdx.x] = static_cast<char>(x[threadIdx.x]);
  if (threadIdx.x == 12) *reinterpret_cast<int*>(values) = 5;
  __syncthreads();
  out[threadIdx.x] = values[threadIdx.x];
}

__global__ void shuffles_instead_of_waiting(const int* x, int* out) {
  __shared__ int values[32];
  values[threadIdx.x % 32] = x[threadIdx.x];
  const int other = __shfl_xor_sync(~0u, x[threadIdx.x], 1);
  out[threadIdx.x] = values[31 - threadIdx.x % 32] + other;
}

__global__ void reads_what_nobody_wrote(const int* x, int* out) {
  __shared__ int values[128];
  if (threadIdx.x < 100) values[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = values[threadIdx.x];
}

__global__ void adds_without_atomics(const int* x, int* out) {
  __shared__ int sum;
  if (threadIdx.x == 0) sum = 0;
  __syncthreads();
  sum += x[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = sum;
}

__global__ void reads_beyond_shared_memory(const int* x, int* out) {
  extern __shared__ int values[];
  values[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = values[threadIdx.x + 1];
}

__global__ void reads_shared_memory_unaligned(const int* x, int* out) {
  extern __shared__ int values[];
  values[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = *reinterpret_cast<const int*>(reinterpret_cast<const char*>(values) + 2 * (threadIdx.x / 2));
}

__global__ void waits_for_threads_that_never_come(const int* x, int* out) {
  if (threadIdx.x < 64) asm volatile("bar.sync 3, 128;" ::: "memory");
  out[threadIdx.x] = x[threadIdx.x];
}

__global__ void waits_in_divergent_code(const int* x, int* out) {
  if (x[threadIdx.x] % 2)
    asm volatile("bar.sync 0; // odd" ::: "memory");
  else
    asm volatile("bar.sync 0; // even" ::: "memory");
  out[threadIdx.x] = x[threadIdx.x];
}

__global__ void shuffles_with_a_lane_elsewhere(const int* x, int* out) {
  int mine = x[threadIdx.x];
  if (threadIdx.x % 32 != 7)
    mine = __shfl_sync(~0u, mine, 0);
  else
    mine = __ballot_sync(~0u, mine);
  out[threadIdx.x] = mine;
}

__global__ void shuffles_with_a_mask_without_itself(const int* x, int* out) {
  out[threadIdx.x] = __shfl_sync(0xFFFF, x[threadIdx.x], 0);
}

__global__ void spins_for_ever(const int* x, int* out) {
  while (*static_cast<const volatile int*>(x) != -1) {
  }
  out[threadIdx.x] = 1;
}

__global__ void writes_a_constant_pointer(const int* x, int* out) {
  *const_cast<int*>(x + threadIdx.x) = 0;
  out[threadIdx.x] = 0;
}

__global__ void asks_for_the_time(const int* x, int* out) { out[threadIdx.x] = x[0] + static_cast<int>(clock64()); }

__global__ void is_not_exact(const int* x, int* out) {
  out[threadIdx.x] = static_cast<int>(__expf(static_cast<float>(x[threadIdx.x])));
}

}  // extern "C"
