// Products of any codes on any GPU: tiles of 64 x 64 outputs from codes that are decoded to float32 in shared memory,
// with the sums of numerics.md 7.4 in its order. A product of two codes is exact, so adding it by one fused operation
// gives the bits of two.
#include "quire/cuda/kernels/codes.cuh"

using namespace quire;
using namespace quire::cuda;

namespace {

/// Outputs of a thread, in each direction.
constexpr int kEach = 4;
constexpr int kPart = 8;   ///< codes that a thread decodes of a line
constexpr int kHalf = 16;  ///< the shortest cut
constexpr int kTile = kProductTile, kDepth = kProductDepth;
static_assert(kTile / kEach * (kTile / kEach) == kProductThreads && kDepth == 2 * kHalf);
static_assert(kProductThreads == kTile * (kDepth / kPart) && kProductThreads == 2 * 2 * kTile);

struct Memory {
  SharedProduct product;
  /// Codes by place in the contraction and by line. Threads of a warp write lines, and read four of them at once.
  alignas(16) float a[kDepth][kTile + kEach];
  alignas(16) float b[kDepth][kTile + kEach];
  /// Of each half of the depth.
  alignas(16) float a_scale[2][kTile];
  alignas(16) float b_scale[2][kTile];
};

__device__ void decode_part(float (&to)[kDepth][kTile + kEach], const CodeLine& line, const Decoder& decoder,
                            int64_t depth, int64_t contraction) {
  const int at = threadIdx.x % kTile, part = threadIdx.x / kTile * kPart;
  const int64_t first = depth + part;
  const uint32_t low = line.word(line.packed() ? first / 8 : first / 4),
                 high = line.packed() ? 0 : line.word(first / 4 + 1);
#pragma unroll
  for (int k = 0; k < kPart; ++k) {
    const uint32_t code = line.packed() ? low >> 4 * k : (k < 4 ? low : high) >> 8 * (k % 4);
    to[part + k][at] = first + k < contraction ? decoder(code) : 0.0f;
  }
}

/// One scale by each thread.
__device__ void read_scales(Memory& m, const OneProduct& p, int64_t row, int64_t col, int64_t depth) {
  const int at = threadIdx.x % kTile, half = threadIdx.x / kTile % 2;
  const int64_t l = depth + half * kHalf;
  if (threadIdx.x < kProductThreads / 2)
    m.a_scale[half][at] = scale_at(p.a, row + at, l);
  else
    m.b_scale[half][at] = scale_at(p.b, col + at, l);
}

/// Outputs of this thread: sums of a cut, and of the cuts before it.
struct Sums {
  float cut[kEach][kEach] = {}, all[kEach][kEach] = {};

  __device__ void add(const Memory& m, int half, int row, int col) {
#pragma unroll
    for (int l = 0; l < kHalf; ++l) {
      const float4 a = *reinterpret_cast<const float4*>(&m.a[half * kHalf + l][row]);
      const float4 b = *reinterpret_cast<const float4*>(&m.b[half * kHalf + l][col]);
      const float x[kEach] = {a.x, a.y, a.z, a.w}, y[kEach] = {b.x, b.y, b.z, b.w};
#pragma unroll
      for (int i = 0; i < kEach; ++i)
#pragma unroll
        for (int j = 0; j < kEach; ++j) cut[i][j] = __fmaf_rn(x[i], y[j], cut[i][j]);
    }
  }
  __device__ void end_cut(const Memory& m, int half, int row, int col) {
#pragma unroll
    for (int i = 0; i < kEach; ++i)
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        all[i][j] += cut[i][j] * m.a_scale[half][row + i] * m.b_scale[half][col + j];
        cut[i][j] = 0;
      }
  }
};

__device__ void multiply_tile(const OneProduct& p, int64_t row, int64_t col, Memory& m) {
  const CodeLine a(p.a, row + threadIdx.x % kTile), b(p.b, col + threadIdx.x % kTile);
  const Decoder of_a(p.a.from.spec.element), of_b(p.b.from.spec.element);
  const int down = threadIdx.x / (kTile / kEach) * kEach, across = threadIdx.x % (kTile / kEach) * kEach;
  const int64_t contraction = p.a.contraction, cut = cut_of(p);
  Sums sums;
  for (int64_t depth = 0; depth < contraction; depth += kDepth) {
    __syncthreads();
    decode_part(m.a, a, of_a, depth, contraction);
    decode_part(m.b, b, of_b, depth, contraction);
    read_scales(m, p, row, col, depth);
    __syncthreads();
    for (int half = 0; half < 2; ++half) {
      sums.add(m, half, down, across);
      const int64_t end = depth + (half + 1) * kHalf;
      if ((end & (cut - 1)) == 0 || end >= contraction) sums.end_cut(m, half, down, across);
    }
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i)
#pragma unroll
    for (int j = 0; j < kEach; ++j)
      if (const int64_t r = row + down + i, c = col + across + j; r < p.to.out.rows && c < p.to.out.cols)
        p.to.store(r, c, finished(p, r, c, sums.all[i][j]));
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kProductThreads) decode32(const __grid_constant__ GemmJob job) {
  __shared__ Memory memory;
  each_product(job, [&](const OneProduct& one) {
    const OneProduct& p = memory.product.hold(one);
    const int64_t across = ceil_div(p.to.out.cols, int64_t{kTile}), down = ceil_div(p.to.out.rows, int64_t{kTile});
    for (int64_t t = blockIdx.x; t < across * down; t += gridDim.x)
      multiply_tile(p, t / across * kTile, t % across * kTile, memory);
  });
}
