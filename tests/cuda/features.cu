// A kernel for each thing that a kernel may use, whose result test_features.cpp knows from elsewhere.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace {

__device__ unsigned linear_thread() { return (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x; }
__device__ unsigned linear_block() { return (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x; }

__constant__ int kPrimes[8] = {2, 3, 5, 7, 11, 13, 17, 19};
__constant__ float kHalves[4] = {0.5f, 1.5f, -2.5f, 3.5f};

struct Triple {
  int64_t a;
  int b;
  float c;
};

__device__ __noinline__ uint64_t factorial(uint64_t n) { return n < 2 ? 1 : n * factorial(n - 1); }

__device__ __noinline__ Triple turned(Triple t, int by) { return {t.a + by, t.b - by, t.c * static_cast<float>(by)}; }

__device__ __noinline__ void fill(int* values, int count, int first) {
  for (int i = 0; i < count; ++i) values[i] = first + i;
}

}  // namespace

extern "C" {

__global__ void places(unsigned* out) {
  const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
  out[linear_block() * threads + linear_thread()] =
      threadIdx.x | threadIdx.y << 4 | threadIdx.z << 8 | blockIdx.x << 12 | blockIdx.y << 16 | blockIdx.z << 20;
}

__global__ void reverse_by_static_memory(const int* x, int* out) {
  __shared__ int values[256];
  values[threadIdx.x] = x[blockIdx.x * 256 + threadIdx.x];
  __syncthreads();
  out[blockIdx.x * 256 + threadIdx.x] = values[255 - threadIdx.x];
}

/// Bytes that neighbours write, read as words; behind static memory.
__global__ void gather_by_dynamic_memory(const uint8_t* x, uint32_t* out, int count) {
  extern __shared__ __align__(16) uint8_t bytes[];
  __shared__ uint32_t sum;
  if (threadIdx.x == 0) sum = 0;
  for (int i = threadIdx.x; i < count; i += blockDim.x) bytes[i] = x[i];
  __syncthreads();
  uint32_t mine = 0;
  for (int i = threadIdx.x; i < count / 4; i += blockDim.x) mine += reinterpret_cast<const uint32_t*>(bytes)[i];
  atomicAdd(&sum, mine);
  __syncthreads();
  if (threadIdx.x == 0) *out = sum;
}

__global__ void shuffles(const uint32_t* x, uint32_t* out) {
  const unsigned lane = threadIdx.x;
  const uint32_t mine = x[lane];
  out[lane] = __shfl_up_sync(~0u, mine, 3);
  out[32 + lane] = __shfl_down_sync(~0u, mine, 5, 16);
  out[64 + lane] = __shfl_xor_sync(~0u, mine, 9);
  out[96 + lane] = __shfl_sync(~0u, mine, lane * 7, 8);
  if (lane < 12) out[128 + lane] = __shfl_sync(0xFFF, mine, 11 - lane);
}

__global__ void votes(const int* x, unsigned* out) {
  const unsigned lane = threadIdx.x;
  const int mine = x[lane];
  out[lane] = __ballot_sync(~0u, mine > 3);
  out[32 + lane] = __all_sync(~0u, mine >= 0) | __any_sync(~0u, mine == 7) << 1 | __all_sync(~0u, mine > 0) << 2;
  out[64 + lane] = __match_any_sync(~0u, mine);
  out[96 + lane] = __reduce_add_sync(~0u, mine);
  out[128 + lane] = __reduce_max_sync(~0u, -mine);
  out[160 + lane] = __reduce_xor_sync(~0u, static_cast<unsigned>(mine));
  int same = 0;
  out[192 + lane] = __match_all_sync(~0u, mine / 100, &same) + same;
}

__global__ void counts(const int* x, int* out) {
  const int mine = x[threadIdx.x];
  const int count = __syncthreads_count(mine > 3), all = __syncthreads_and(mine > 3), any = __syncthreads_or(mine > 3);
  out[threadIdx.x] = count * 4 + (all != 0) * 2 + (any != 0);
}

/// Two warps write, two others read, by a pair of named barriers.
__global__ void hand_over(const int* x, int* out, int rounds) {
  __shared__ int values[64];
  const int lane = threadIdx.x % 64;
  for (int i = 0; i < rounds; ++i) {
    if (threadIdx.x < 64) {
      if (i > 0) asm volatile("bar.sync 2, 128;" ::: "memory");
      values[lane] = x[i * 64 + lane];
      asm volatile("bar.arrive 1, 128;" ::: "memory");
    } else {
      asm volatile("bar.sync 1, 128;" ::: "memory");
      out[i * 64 + lane] = values[63 - lane];
      if (i + 1 < rounds) asm volatile("bar.arrive 2, 128;" ::: "memory");
    }
  }
}

/// A warp needs no barrier of the block.
__global__ void sums_of_warps(const int* x, int* out) {
  __shared__ int values[4][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  values[warp][lane] = x[threadIdx.x];
  __syncwarp();
  for (int step = 16; step > 0; step /= 2) {
    if (lane < step) values[warp][lane] += values[warp][lane + step];
    __syncwarp();
  }
  // All lanes read it, and one changes it.
  const int sum = values[warp][0];
  __syncwarp();
  if (lane == 7) values[warp][0] = sum + 1;
  __syncwarp();
  if (lane == 0) out[warp] = values[warp][0] - 1;
}

/// Who arrives at a barrier does not wait there.
__global__ void arrives_and_goes_on(int* out) {
  __shared__ int value;
  if (threadIdx.x < 32) {
    if (threadIdx.x == 0) value = out[32];
    asm volatile("bar.arrive 1, 64;" ::: "memory");
    asm volatile("bar.sync 2, 64;" ::: "memory");
  } else {
    asm volatile("bar.arrive 2, 64;" ::: "memory");
    asm volatile("bar.sync 1, 64;" ::: "memory");
    out[threadIdx.x - 32] = value;
  }
}

__global__ void atomics(const int* x, uint32_t* words, uint64_t* wide, float* real, double* real64) {
  const int mine = x[blockIdx.x * blockDim.x + threadIdx.x];
  atomicAdd(&words[0], static_cast<uint32_t>(mine));
  atomicMax(&words[1], static_cast<uint32_t>(mine));
  atomicMin(reinterpret_cast<int*>(&words[2]), -mine);
  atomicAnd(&words[3], ~(1u << mine % 32));
  atomicOr(&words[4], 1u << mine % 32);
  atomicXor(&words[5], static_cast<uint32_t>(mine));
  atomicInc(&words[6], 9);
  if (mine == 5) atomicExch(&words[7], 77u);
  atomicCAS(&words[8], static_cast<uint32_t>(mine), static_cast<uint32_t>(mine + 1));
  atomicAdd(reinterpret_cast<unsigned long long*>(&wide[0]), static_cast<unsigned long long>(mine) << 30);
  atomicMax(reinterpret_cast<long long*>(&wide[1]), static_cast<long long>(-mine));
  atomicAdd(real, static_cast<float>(mine));
  atomicAdd(real64, 0.5 * mine);
}

__global__ void tickets(unsigned* counter, unsigned* out) {
  out[blockIdx.x * blockDim.x + threadIdx.x] = atomicAdd(counter, 1u);
}

__global__ void waits_for_another_thread(volatile int* flag, int* out) {
  if (threadIdx.x == 0) {
    while (*flag == 0) {
    }
    __threadfence();
    out[0] = *flag;
  } else if (threadIdx.x == 40) {
    *flag = 17;
  }
}

__global__ void vectors(const float4* x, const uint2* y, float4* out, uint2* out2) {
  const float4 v = __ldg(&x[threadIdx.x]);
  out[threadIdx.x] = make_float4(v.w, v.z, v.y, v.x);
  out2[threadIdx.x] = make_uint2(y[threadIdx.x].y, y[threadIdx.x].x);
}

__global__ void tables(const int* index, int* out, float* real) {
  out[threadIdx.x] = kPrimes[index[threadIdx.x]];
  real[threadIdx.x] = kHalves[index[threadIdx.x] % 4];
}

__global__ void functions(const int* x, uint64_t* out, Triple* triples) {
  const int mine = x[threadIdx.x];
  out[threadIdx.x] = factorial(static_cast<uint64_t>(mine));
  triples[threadIdx.x] = turned(turned({mine, mine * 2, 1.5f}, mine), 3);
  int values[10];
  fill(values, 10, mine);
  out[32 + threadIdx.x] = static_cast<uint64_t>(values[(mine * 3) % 10]);
}

__global__ void switches(const int* x, int* out) {
  int value = x[threadIdx.x];
  switch (value) {
    case 0:
      out[threadIdx.x] = 5;
      atomicAdd(out + 40, 1);
      break;
    case 1:
      out[threadIdx.x] = out[39];
      break;
    case 2:
      out[threadIdx.x + 1 - 1] = value * value + 9;
      atomicMax(out + 41, 3);
      break;
    case 3:
      atomicAdd(out + 42, 4);
      out[threadIdx.x] = 1;
      break;
    case 4:
      out[threadIdx.x] = __popc(value) - 8;
      atomicAdd(out + 43, 2);
      break;
    case 5:
      out[threadIdx.x] = value << 9;
      break;
    case 6:
      out[threadIdx.x] = out[38] / 3;
      break;
    default:
      out[threadIdx.x] = -1;
  }
}

__global__ void bits(const uint32_t* x, uint32_t* out) {
  const uint32_t a = x[2 * threadIdx.x], b = x[2 * threadIdx.x + 1];
  uint32_t* to = out + 16 * threadIdx.x;
  to[0] = __byte_perm(a, b, 0x3715);
  to[1] = __funnelshift_l(a, b, 13);
  to[2] = __funnelshift_r(a, b, 7);
  to[3] = static_cast<uint32_t>(__clz(static_cast<int>(a >> 5)));
  to[4] = static_cast<uint32_t>(__popc(a)) << 8 | static_cast<uint32_t>(__ffs(static_cast<int>(b)));
  to[5] = __brev(a);
  to[6] = static_cast<uint32_t>(__dp4a(static_cast<int>(a), static_cast<int>(b), -5));
  to[7] = __dp4a(a, b, 9u);
  asm("bfe.s32 %0, %1, 5, 9;" : "=r"(to[8]) : "r"(a));
  asm("lop3.b32 %0, %1, %2, %3, 0x96;" : "=r"(to[9]) : "r"(a), "r"(b), "r"(a >> 3));
  to[10] = __umulhi(a, b);
  to[11] = static_cast<uint32_t>(__mulhi(static_cast<int>(a), static_cast<int>(b)));
  const unsigned __int128 wide = static_cast<unsigned __int128>((uint64_t{a} << 32 | b)) * (uint64_t{b} << 32 | a) + a;
  to[12] = static_cast<uint32_t>(wide >> 96);
  to[13] = static_cast<uint32_t>(wide >> 64);
  to[14] = static_cast<uint32_t>(wide >> 32);
  to[15] = static_cast<uint32_t>(wide);
}

__global__ void roundings(const float* x, float* out, double* wide, int* integers, int64_t* integers64) {
  const float a = x[2 * threadIdx.x], b = x[2 * threadIdx.x + 1];
  float* to = out + 12 * threadIdx.x;
  to[0] = __fadd_rz(a, b), to[1] = __fadd_ru(a, b), to[2] = __fmul_rd(a, b), to[3] = __fmaf_rn(a, b, a);
  to[4] = __fdiv_rn(a, b), to[5] = __fsqrt_rn(fabsf(a)), to[6] = floorf(a), to[7] = rintf(a);
  to[8] = __saturatef(a), to[9] = __frcp_rn(b), to[10] = fmaxf(a, b), to[11] = copysignf(a, b);
  double* to64 = wide + 4 * threadIdx.x;
  to64[0] = static_cast<double>(a) * b, to64[1] = fma(double{a}, double{b}, 1e-9), to64[2] = sqrt(fabs(double{b}));
  to64[3] = double{a} / b;
  integers[3 * threadIdx.x] = __float2int_rn(a), integers[3 * threadIdx.x + 1] = __float2int_ru(b);
  integers[3 * threadIdx.x + 2] = static_cast<int>(__float2uint_rz(a));
  integers64[threadIdx.x] = __double2ll_rd(double{a} * 65536.5);
}

__global__ void halves(const float* x, uint16_t* out, uint32_t* pairs, float* back) {
  const float a = x[2 * threadIdx.x], b = x[2 * threadIdx.x + 1];
  uint16_t* to = out + 4 * threadIdx.x;
  to[0] = __half_as_ushort(__float2half_rn(a));
  to[1] = __bfloat16_as_ushort(__float2bfloat16_rn(a));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(to[2]) : "f"(a), "f"(b));
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(to[3]) : "f"(a), "f"(b));
  uint32_t* pair = pairs + 4 * threadIdx.x;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair[0]) : "f"(a), "f"(b));
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair[1]) : "f"(a), "f"(b));
  asm("fma.rn.f16x2 %0, %1, %1, %1;" : "=r"(pair[2]) : "r"(pair[1]));
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair[3]) : "h"(to[2]));
  back[2 * threadIdx.x] = __half2float(__ushort_as_half(to[0]));
  back[2 * threadIdx.x + 1] = __bfloat162float(__ushort_as_bfloat16(to[1]));
}

}  // extern "C"
