// Products of few rows by tensor cores, which are as fast as memory gives the codes of the columns: w is read once, by
// vectors of 16 bytes, and becomes bfloat16 in the registers of the lane whose fragment it is. A warp has 32 columns,
// which are the rows of its instructions, and a lane has of each cut the same 32 places of the contraction in all of
// its columns and rows: instructions multiply any 16 places. What comes next is read while what is there is multiplied.
//
// A cut is summed by the tensor cores. Cuts of a slice are added in order, then the slices of a part, then the parts.
// So the order of a sum depends on the contraction alone, and not on which warp or block has which slice.
#include "quire/cuda/kernels/skinny_slice.cuh"

using namespace quire;
using namespace quire::cuda;

namespace {

/// An output from its finished sum; row: of the group.
__device__ void finish(const SkinnyJob& job, const SkinnyProduct& p, int64_t row, int64_t column, float sum) {
  const float y = sum * job.constant * job.x.factors[p.tile * kSkinnyRows + row] * p.w.line_factor(column);
  if (job.plain)
    store_plain(p.to, row, column, y);
  else
    p.to.store(row, column, y);
}

/// Adds parts in order, each of which part(number) gives.
template <class Part>
__device__ float sum_of_parts(const Part& part) {
  float sum = part(0);
#pragma unroll
  for (int i = 1; i < kSkinnyParts; ++i) sum += part(i);
  return sum;
}

/// A sum without the factor that kSkinnyFold has put into it.
template <ScaleKind kScale>
__device__ float unfolded(float sum) {
  return kScale == ScaleKind::two_level ? sum * kSkinnyUnfold : sum;
}

/// Whether a group has rows, and columns: there are none where their places were found wrong, and reported.
__device__ bool is_there(const SkinnyJob& job, int64_t e) { return job.groups[e].rows > 0 && job.w.groups[e].rows > 0; }

/// The first group from `e` on, of those of this block, that is there.
__device__ int64_t next_group(const SkinnyJob& job, int64_t e) {
  while (e < job.groups.count && !is_there(job, e)) e += gridDim.y;
  return e;
}

/// Calls each() for every product of this block.
template <class Held, class Each>
__device__ void each_held(const SkinnyJob& job, Held& memory, const Each& each) {
  bool held = false;  // a product, which other threads may not have finished
  for (int64_t e = next_group(job, blockIdx.y); e < job.groups.count;
       e = next_group(job, memory.product().group + gridDim.y)) {
    if (held) __syncthreads();
    held = true;
    memory.hold(job, e, job.groups[e]);
    each();
  }
}

/// Adds the slices of an output in row r of a block's, and of this lane's column.
template <ScaleKind kScale, class Held>
__device__ void store_narrow(const SkinnyJob& job, const Held& memory, int r) {
  const SkinnyProduct& p = memory.product();
  const int64_t row = memory.row + r, column = memory.block * kSkinnyColumns + lane();
  if (row >= p.rows || column >= p.columns) return;
  const int c = lane(), at = c / 16 * static_cast<int>(kNarrowRows / kSkinnyRows) + r / 8;
  const auto slice = [&](int i) {
    const float4& fragment = memory.sums[i][at][c % 8 * 4 + r % 8 / 2];
    return (&fragment.x)[c / 8 % 2 * 2 + r % 2];
  };
  const float sum = sum_of_parts([&](int part) { return slice(2 * part) + slice(2 * part + 1); });
  finish(job, p, row, column, unfolded<kScale>(sum));
}

/// All slices of 32 columns by a block, by 16 rows at a time.
template <ScaleKind kScale, bool kPacked>
__device__ void multiply_narrow(const SkinnyJob& job) {
  constexpr int kRows = kNarrowRows, kTiles = kRows / kSkinnyRows;
  using Sums = SkinnySlice<kScale, kPacked, kTiles>;
  static_assert(kSkinnyThreads == kSkinnySlices * kWarp && Sums::kUpper == kTiles);
  __shared__ SkinnyMemory<kSkinnyColumns, Sums::kSums> memory;
  const SkinnyProduct& p = memory.product();
  each_held(job, memory, [&] {
    for (unsigned block = blockIdx.x; block * kSkinnyColumns < p.columns; block = memory.block + gridDim.x)
      for (int row = 0; row < p.rows; row = memory.row + kRows) {
        const int warp = static_cast<int>(threadIdx.x) / kWarp;
        memory.begin_at(block, row, block != blockIdx.x || row > 0);
        Sums(job, p, memory.lines, memory.sums[warp], row).run(warp);
        __syncthreads();
#pragma unroll 1
        for (int r = warp; r < kRows; r += kSkinnySlices) store_narrow<kScale>(job, memory, r);
      }
  });
}

/// Where a fragment of a part begins: its first row, of the group, and column.
struct PartAt {
  int part, row;
  int64_t column;
};

/// Writes the sums of two slices, of 16 columns by a tile of rows.
template <ScaleKind kScale>
__device__ void store_part(const SkinnyJob& job, const SkinnyProduct& p, const PartAt& at, const float4& sums) {
  float* const to = job.parts + (at.part * job.groups.rows + p.begin) * p.columns;
  const float of[4] = {sums.x, sums.y, sums.z, sums.w};
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int r = at.row + lane() % 4 * 2 + e % 2;
    const int64_t c = at.column + lane() / 4 + e / 2 * 8;
    if (r < p.rows && c < p.columns) to[int64_t{r} * p.columns + c] = unfolded<kScale>(of[e]);
  }
}

/// One part of 128 columns by a block: a warp has a slice of 32 of them. skinny_finish adds the parts.
template <ScaleKind kScale, bool kPacked>
__device__ void multiply_wide(const SkinnyJob& job) {
  constexpr int kTiles = kWideRows / kSkinnyRows;
  using Sums = SkinnySlice<kScale, kPacked, kTiles>;
  static_assert(kSkinnyThreads / kWarp == 2 * kWideColumns / kSkinnyColumns);
  __shared__ SkinnyMemory<kWideColumns, Sums::kSums> memory;
  const SkinnyProduct& p = memory.product();
  // Blocks share a product's parts: block b has part b % kSkinnyParts.
  const int warp = static_cast<int>(threadIdx.x) / kWarp, part = static_cast<int>(blockIdx.x % kSkinnyParts);
  const int first = warp / 2 * static_cast<int>(kSkinnyColumns);  // of this warp's columns
  each_held(job, memory, [&] {
    for (unsigned block = blockIdx.x / kSkinnyParts; block * kWideColumns < p.columns;
         block = memory.block + gridDim.x / kSkinnyParts) {
      memory.begin_at(block, 0, block != blockIdx.x / kSkinnyParts);
      Sums slice(job, p, memory.lines + first, memory.sums[warp], 0);
      if (block * kWideColumns + first < p.columns) slice.run(2 * part + warp % 2);
#pragma unroll
      for (const bool in_memory : {true, false}) {
        if (!in_memory && warp % 2 == 1)
#pragma unroll
          for (int n = Sums::kUpper; n < kTiles; ++n) memory.sums[warp][n][lane()] = slice.fragment(1, n);
        __syncthreads();
        if (warp % 2 == 0)
#pragma unroll
          for (int m = 0; m < kSkinnyLines / 2; ++m)
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
              if (Sums::is_in_memory(m, n) != in_memory) continue;
              const float4 one = slice.fragment(m, n),
                           other = memory.sums[warp + 1][in_memory ? m * kTiles + n : n][lane()];
              store_part<kScale>(job, p, {part, n * 8, memory.block * kWideColumns + first + m * 16},
                                 {one.x + other.x, one.y + other.y, one.z + other.z, one.w + other.w});
            }
        if (in_memory) __syncthreads();  // nobody reads those any more
      }
    }
  });
}

}  // namespace

extern "C" {

__global__ void __launch_bounds__(kSkinnyThreads, 2) skinny_f32_16(const __grid_constant__ SkinnyJob job) {
  multiply_narrow<ScaleKind::f32, false>(job);
}
__global__ void __launch_bounds__(kSkinnyThreads, 2) skinny_e8m0_16(const __grid_constant__ SkinnyJob job) {
  multiply_narrow<ScaleKind::e8m0, false>(job);
}
__global__ void __launch_bounds__(kSkinnyThreads, 2) skinny_packed_e8m0_16(const __grid_constant__ SkinnyJob job) {
  multiply_narrow<ScaleKind::e8m0, true>(job);
}
__global__ void __launch_bounds__(kSkinnyThreads, 2) skinny_two_level_16(const __grid_constant__ SkinnyJob job) {
  multiply_narrow<ScaleKind::two_level, true>(job);
}
__global__ void __launch_bounds__(kSkinnyThreads, 1) skinny_f32_64(const __grid_constant__ SkinnyJob job) {
  multiply_wide<ScaleKind::f32, false>(job);
}
__global__ void __launch_bounds__(kSkinnyThreads, 1) skinny_e8m0_64(const __grid_constant__ SkinnyJob job) {
  multiply_wide<ScaleKind::e8m0, false>(job);
}
__global__ void __launch_bounds__(kSkinnyThreads, 1) skinny_packed_e8m0_64(const __grid_constant__ SkinnyJob job) {
  multiply_wide<ScaleKind::e8m0, true>(job);
}
__global__ void __launch_bounds__(kSkinnyThreads, 1) skinny_two_level_64(const __grid_constant__ SkinnyJob job) {
  multiply_wide<ScaleKind::two_level, true>(job);
}

/// Adds the parts of outputs, in order.
__global__ void skinny_finish(const __grid_constant__ SkinnyJob job) {
  each_group(job.groups, [&](int64_t e, const GroupPlace& place) {
    if (!is_there(job, e)) return;
    const SkinnyProduct p(job, e, place);
    const int64_t columns = p.to.out.cols, step = job.groups.rows * columns;
    each_of(place.rows * columns, [&](int64_t i) {
      const float* const from = job.parts + p.begin * columns + i;
      finish(job, p, i / columns, i % columns, sum_of_parts([&](int part) { return from[part * step]; }));
    });
  });
}

}  // extern "C"
