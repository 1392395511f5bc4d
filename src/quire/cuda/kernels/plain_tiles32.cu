// Plain products in float32, of operands of any dtype or of codes, to any dtype: tiles of 64 x 64 outputs. Terms are
// added by one fused operation each, in the order of the contraction, within cuts of numerics.md 7.4. An output's bits
// depend on no other output.
#include "quire/cuda/kernels/plain.cuh"

using namespace quire;
using namespace quire::cuda;

namespace {

/// Outputs of a thread, in each direction.
constexpr int kEach = 4;
constexpr int kTile = kProductTile, kDepth = kProductDepth;
static_assert(kTile / kEach * (kTile / kEach) == kProductThreads && kTile * kDepth == kProductThreads * kUnit);

/// Numbers by place in the contraction and by line.
using Numbers = float[kDepth][kTile + kEach];

struct Memory {
  alignas(16) Numbers a;
  alignas(16) Numbers b;
  PlainMemory plain;
};

/// One unit by each thread. Threads of a warp write neighbouring lines.
__device__ void fill(Numbers& to, const RowLayout& layout, int64_t first_line, int64_t depth, DType dtype) {
  const int thread = static_cast<int>(threadIdx.x);
  if (layout.across()) {
    const int row = thread / (kTile / kUnit), line = thread % (kTile / kUnit) * kUnit;
    const UnitValues u = layout.values_at(layout.row(depth + row), first_line + line).in(dtype);
    *reinterpret_cast<float4*>(&to[row][line]) = {u.v[0], u.v[1], u.v[2], u.v[3]};
    *reinterpret_cast<float4*>(&to[row][line + 4]) = {u.v[4], u.v[5], u.v[6], u.v[7]};
    return;
  }
  const int line = thread % kTile, at = thread / kTile * kUnit;
  const UnitValues u = layout.values_at(layout.row(first_line + line), depth + at).in(dtype);
#pragma unroll
  for (int k = 0; k < kUnit; ++k) to[at + k][line] = u.v[k];
}

/// Outputs of this thread: sums of a cut, and of the cuts before it.
struct Sums {
  float cut[kEach][kEach] = {}, all[kEach][kEach] = {};

  __device__ void add(const Memory& m, int row, int col) {
#pragma unroll 8
    for (int l = 0; l < kDepth; ++l) {
      const float4 a = *reinterpret_cast<const float4*>(&m.a[l][row]);
      const float4 b = *reinterpret_cast<const float4*>(&m.b[l][col]);
      const float x[kEach] = {a.x, a.y, a.z, a.w}, y[kEach] = {b.x, b.y, b.z, b.w};
#pragma unroll
      for (int i = 0; i < kEach; ++i)
#pragma unroll
        for (int j = 0; j < kEach; ++j) cut[i][j] = __fmaf_rn(x[i], y[j], cut[i][j]);
    }
  }
  __device__ void end_cut() {
#pragma unroll
    for (int i = 0; i < kEach; ++i)
#pragma unroll
      for (int j = 0; j < kEach; ++j) all[i][j] += cut[i][j], cut[i][j] = 0;
  }
};

__device__ void multiply_tile(const OnePlainProduct& p, int64_t row, int64_t col, Memory& m) {
  const int down = static_cast<int>(threadIdx.x) / (kTile / kEach) * kEach,
            across = static_cast<int>(threadIdx.x) % (kTile / kEach) * kEach;
  Sums sums;
  for (int64_t depth = 0; depth < p.contraction; depth += kDepth) {
    __syncthreads();
    fill(m.a, m.plain.layout(0), row, depth, p.to.out.dtype);
    fill(m.b, m.plain.layout(1), col, depth, p.to.out.dtype);
    __syncthreads();
    sums.add(m, down, across);
    if ((depth + kDepth) % kLongestCut == 0 || depth + kDepth >= p.contraction) sums.end_cut();
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i)
#pragma unroll
    for (int j = 0; j < kEach; ++j)
      if (const int64_t r = row + down + i, c = col + across + j; r < p.to.out.rows && c < p.to.out.cols)
        store_plain(p.to, r, c, sums.all[i][j]);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kProductThreads) plain_tiles32(const __grid_constant__ MatmulJob job) {
  __shared__ Memory memory;
  memory.plain.each_held(job, [&] {
    const OnePlainProduct& p = memory.plain.product();
    const int64_t across = ceil_div(p.to.out.cols, int64_t{kTile}), down = ceil_div(p.to.out.rows, int64_t{kTile});
    for (int64_t t = blockIdx.x; t < across * down; t += gridDim.x)
      multiply_tile(p, t / across * kTile, t % across * kTile, memory);
  });
}
