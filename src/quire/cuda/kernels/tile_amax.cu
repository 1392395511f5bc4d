#include "quire/cuda/kernels/tiles.cuh"

using namespace quire;
using namespace quire::cuda;

namespace {

template <DType kDType>
__device__ void measure_tile(const TileAmaxJob& job) {
  extern __shared__ uint4 tile[];
  const TilePlace place(job.groups, job.x.cols);
  if (place.group < 0) return;
  const Matrix x = group_matrix(job.x, job.each, place.group, job.groups[place.group]);
  Largest<kDType> seen;
  each_run<kDType>(x, place, [&](int row, int col, const auto& words) {
    if (job.transformed) keep<kDType>(tile, row, col, words);
    QUIRE_UNROLL
    for (const uint32_t word : words) seen.add(word);
  });
  seen.merge();
  if (job.plain) {
    const uint32_t bits = largest_of_block(seen.of(0));
    if (threadIdx.x == 0) atomicMax(job.plain + place.group, bits);
  }
  if (!job.transformed) return;
  __syncthreads();
  Largest<DType::bf16> columnwise;
  using Share = ColumnShare<false>;
#pragma unroll 1
  for (int turn = 0; turn < Share::kTurns; ++turn) {
    const Share share(turn);
    const Columns<kDType, Share::kCols> columns(tile, share.row, share.col);
    QUIRE_UNROLL
    for (int c = 0; c < Share::kCols; ++c) {
      const auto words = transformed(columns, c, job.signs);
      QUIRE_UNROLL
      for (const uint32_t word : words) columnwise.add(word);
    }
  }
  columnwise.merge();
  const uint32_t bits = largest_of_block(columnwise.of(0));
  if (threadIdx.x == 0) atomicMax(job.transformed + place.group, bits);
}

template <DType kDType>
__device__ void measure_lines(const TileAmaxJob& job) {
  __shared__ uint32_t most[kTile];
  const TilePlace place(job.groups, job.x.cols);
  if (place.group < 0) return;
  const GroupPlace group = job.groups[place.group];
  const Matrix x = group_matrix(job.x, job.each, place.group, group);
  if (threadIdx.x < kTile) most[threadIdx.x] = 0;
  __syncthreads();
  constexpr int words = kWords<kDType>, series = kRun / words;
  constexpr unsigned lanes = kRowLanes;
  Largest<kDType> columns[words];
  each_run<kDType>(x, place, [&](int row, int, const auto& run) {
    QUIRE_UNROLL
    for (int w = 0; w < words; ++w) columns[w].add(run[w]);
    Largest<kDType> seen;
    QUIRE_UNROLL
    for (const uint32_t word : run) seen.add(word);
    seen.merge();
    QUIRE_UNROLL
    for (unsigned bit = 1; bit < lanes; bit *= 2) seen.join(bit);
    if (job.rows && threadIdx.x % lanes == 0 && place.row + row < x.rows)
      atomicMax(job.rows + group.begin + place.row + row, std::bit_cast<uint32_t>(seen.of(0)));
  });
  if (!job.columns) return;
  QUIRE_UNROLL
  for (int w = 0; w < words; ++w) {
    QUIRE_UNROLL
    for (unsigned bit = lanes; bit < 32; bit *= 2) columns[w].join(bit);
    QUIRE_UNROLL
    for (int s = 0; s < series && threadIdx.x % 32 < lanes; ++s)
      atomicMax(&most[threadIdx.x % lanes * kRun + w * series + s], std::bit_cast<uint32_t>(columns[w].of(s)));
  }
  __syncthreads();
  if (threadIdx.x < kTile && place.col + threadIdx.x < x.cols)
    atomicMax(job.columns + place.group * x.cols + place.col + threadIdx.x, most[threadIdx.x]);
}

}  // namespace

extern "C" {

__global__ void __launch_bounds__(kTileThreads) amax_f32(const __grid_constant__ TileAmaxJob job) {
  measure_tile<DType::f32>(job);
}
__global__ void __launch_bounds__(kTileThreads) amax_f16(const __grid_constant__ TileAmaxJob job) {
  measure_tile<DType::f16>(job);
}
__global__ void __launch_bounds__(kTileThreads) amax_bf16(const __grid_constant__ TileAmaxJob job) {
  measure_tile<DType::bf16>(job);
}

__global__ void __launch_bounds__(kTileThreads) lines_f32(const __grid_constant__ TileAmaxJob job) {
  measure_lines<DType::f32>(job);
}
__global__ void __launch_bounds__(kTileThreads) lines_f16(const __grid_constant__ TileAmaxJob job) {
  measure_lines<DType::f16>(job);
}
__global__ void __launch_bounds__(kTileThreads) lines_bf16(const __grid_constant__ TileAmaxJob job) {
  measure_lines<DType::bf16>(job);
}

}  // extern "C"
