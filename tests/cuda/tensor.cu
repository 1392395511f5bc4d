// The words of the tensor cores and asynchronous copies, one kernel each, over integers.
#include <cstdint>

namespace {

__device__ uint32_t in_shared(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ void copy_16(void* to, const void* from, int valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(in_shared(to)), "l"(from), "r"(valid) : "memory");
}
__device__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kLeft>
__device__ void wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

__device__ void load_x4(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(in_shared(row))
               : "memory");
}
__device__ void load_x2_transposed(uint32_t (&r)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(in_shared(row))
               : "memory");
}
__device__ void load_x2(uint32_t (&r)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(in_shared(row))
               : "memory");
}

__device__ void multiply_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ void multiply_e4m3(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/// d of 16 x 8: the lane has columns 2 (lane % 4) and the next one of rows lane / 4 and the eighth after it.
__device__ void store(float* d, const float (&values)[4]) {
  const int lane = threadIdx.x % 32;
  for (int r = 0; r < 4; ++r) d[(lane / 4 + r / 2 * 8) * 8 + lane % 4 * 2 + r % 2] = values[r];
}

/// Where this lane's row of 16 bytes begins in a matrix of 16 rows of 32 bytes, of which a load takes four parts.
__device__ int part_of_16_rows() {
  const int lane = threadIdx.x % 32;
  return lane % 16 * 32 + lane / 16 * 16;
}
__device__ int part_of_8_rows() {
  const int lane = threadIdx.x % 16;
  return lane % 8 * 32 + lane / 8 * 16;
}

}  // namespace

extern "C" {

/// d = a b + d for a [16, 16] and b [16, 8] of bfloat16, both by rows: b comes transposed.
__global__ void product_of_bf16(const uint16_t* a, const uint16_t* b, float* d) {
  __shared__ __align__(16) char x[512], y[256];
  reinterpret_cast<uint4*>(x)[threadIdx.x] = reinterpret_cast<const uint4*>(a)[threadIdx.x];
  if (threadIdx.x < 16) reinterpret_cast<uint4*>(y)[threadIdx.x] = reinterpret_cast<const uint4*>(b)[threadIdx.x];
  __syncwarp();
  uint32_t of_a[4], of_b[2];
  load_x4(of_a, x + part_of_16_rows());
  load_x2_transposed(of_b, y + threadIdx.x % 16 * 16);
  float sums[4];
  for (int r = 0; r < 4; ++r) sums[r] = d[(threadIdx.x / 4 + r / 2 * 8) * 8 + threadIdx.x % 4 * 2 + r % 2];
  multiply_bf16(sums, of_a, of_b);
  store(d, sums);
}

/// d = a b' for a [16, steps * 32] and b [8, steps * 32] of E4M3, in two buffers that copies fill ahead; the last one
/// may have fewer columns, the rest are 0.
__global__ void product_of_e4m3(const uint8_t* a, const uint8_t* b, float* d, int columns, int stride) {
  __shared__ __align__(16) char x[2][512], y[2][256];
  const int steps = (columns + 31) / 32, lane = threadIdx.x;
  const auto fetch = [&](int step) {
    const int column = step * 32 + lane % 2 * 16, valid = max(0, min(16, columns - column));
    copy_16(&x[step % 2][lane / 2 * 32 + lane % 2 * 16], a + lane / 2 * stride + column, valid);
    if (lane < 16) copy_16(&y[step % 2][lane / 2 * 32 + lane % 2 * 16], b + lane / 2 * stride + column, valid);
  };
  float sums[4] = {};
  fetch(0);
  commit();
  for (int step = 0; step < steps; ++step) {
    if (step + 1 < steps) fetch(step + 1);
    commit();
    wait<1>();
    __syncwarp();
    uint32_t of_a[4], of_b[2];
    load_x4(of_a, x[step % 2] + part_of_16_rows());
    load_x2(of_b, y[step % 2] + part_of_8_rows());
    multiply_e4m3(sums, of_a, of_b);
    __syncwarp();
  }
  store(d, sums);
}

__global__ void reads_before_a_copy_ends(const uint8_t* a, const uint8_t* b, float* d, int columns, int stride) {
  __shared__ __align__(16) float x[128];
  copy_16(x + 4 * threadIdx.x, a + 16 * threadIdx.x, 16);
  commit();
  commit();
  wait<1>();
  copy_16(x + 4 * threadIdx.x, b + 16 * (threadIdx.x % 16), 16);
  commit();
  wait<1>();
  d[threadIdx.x] = x[4 * threadIdx.x] + static_cast<float>(columns + stride);
}

__global__ void ends_before_its_copies(const uint8_t* a, const uint8_t*, float*, int, int) {
  __shared__ __align__(16) float x[128];
  copy_16(x + 4 * threadIdx.x, a + 16 * threadIdx.x, 16);
  commit();
}

/// A copy is of the thread that asked for it: others wait for that thread.
__global__ void reads_a_copy_of_another_lane(const uint8_t* a, const uint8_t*, float* d, int, int) {
  __shared__ __align__(16) float x[128];
  for (int i = threadIdx.x; i < 128; i += 32) x[i] = 0;
  __syncwarp();
  copy_16(x + 4 * threadIdx.x, a + 16 * threadIdx.x, 16);
  commit();
  wait<0>();
  d[threadIdx.x] = x[4 * (threadIdx.x ^ 1)];
}

}  // extern "C"
