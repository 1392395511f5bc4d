// Products of matrices of 16 bits by tensor cores, as a pipeline: while a step of the contraction is multiplied, copies
// of later ones to shared memory are under way. Products of two numbers are exact; the tensor cores sum them in the
// order of the contraction, with one sum for each output (numerics.md 7.5). An output's bits depend neither on the tile
// nor on other outputs.
#pragma once

#include "quire/cuda/kernels/copies.cuh"
#include "quire/cuda/kernels/gemm.h"
#include "quire/cuda/kernels/tensor.cuh"
#include "quire/cuda/kernels/threads.cuh"

namespace quire::cuda {

/// An operand as memory has it: rows that begin at multiples of 16 bytes and have a multiple of kUnitOfCopies numbers.
/// They are its lines, or, across them, places of the contraction.
struct PipelinedOperand {
  const unsigned char* data;
  int64_t row_bytes;
  int64_t lines;
};

/// What a block has of an operand in a step: kLines lines, each with a row of kPipelinedDepth numbers, or, `kAcross`,
/// kPipelinedDepth rows with a number of each line. Rows that are loaded or written together lie in different banks.
template <int kLines, bool kAcross>
struct Stage {
  static constexpr int kRowBytes = (kAcross ? kLines : kPipelinedDepth) * 2;
  static constexpr int kBytes = kLines * kPipelinedDepth * 2;

  static __device__ int place(int row, int chunk) {
    return row * kRowBytes + (chunk ^ (kAcross ? row & 7 : row >> 1 & 3)) * 16;
  }
};

/// Copies the steps of an operand in turn, by kThreads threads. What is beyond the operand is zeros.
template <int kThreads, int kLines, bool kAcross>
class StageCopies {
 public:
  StageCopies() = default;
  __device__ StageCopies(const PipelinedOperand& o, int64_t first_line, int64_t contraction)
      : from_(o.data), between_(kRowsAtOnce * o.row_bytes), to_(static_cast<uint32_t>(Of::place(row(), chunk()))) {
    const int64_t line = first_line + (kAcross ? chunk() * kUnitOfCopies : row()), lines = o.lines - line;
    lines_ = static_cast<int>(lines < kLines ? lines : kLines);
    depth_ = static_cast<int>(contraction) - (kAcross ? row() : chunk() * kUnitOfCopies);
    from_ += kAcross ? row() * o.row_bytes + line * 2 : line * o.row_bytes + chunk() * 16;
    advance_ = kAcross ? kPipelinedDepth * o.row_bytes : kPipelinedDepth * 2;
  }

  /// The next step, to a stage that begins at `stage`.
  __device__ void next(uint32_t stage) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int first = i * kRowsAtOnce;
      const bool there = kAcross ? lines_ > 0 && first < depth_ : first < lines_ && depth_ > 0;
      copy_or_zero(stage + to_ + first * Of::kRowBytes, from_ + i * between_, there);
    }
    from_ += advance_;
    depth_ -= kPipelinedDepth;
  }

 private:
  using Of = Stage<kLines, kAcross>;
  static constexpr int kInRow = Of::kRowBytes / 16, kRowsAtOnce = kThreads / kInRow;
  static constexpr int kEach = Of::kBytes / 16 / kThreads;
  static_assert(kRowsAtOnce % 8 == 0, "rows of a thread lie alike");

  static __device__ int row() { return static_cast<int>(threadIdx.x) / kInRow; }
  static __device__ int chunk() { return static_cast<int>(threadIdx.x) % kInRow; }

  const unsigned char* from_;
  int64_t between_, advance_;
  uint32_t to_;
  int lines_, depth_;  ///< of the operand, from the first copy on
};

/// How a warp reads its kWarpTile lines of a stage. Four matrices of 8 x 8 are two along the lines by two along the
/// contraction. `kByLines`: the first two are neighbours along the lines, else along the contraction.
template <int kLines, bool kAcross, bool kByLines>
class StageLoads {
 public:
  __device__ explicit StageLoads(int first_line) {
    const int first = lane() / 8 % 2, second = lane() / 16;
    const int lines = kByLines ? first : second, depths = kByLines ? second : first;
    at_ = static_cast<uint32_t>(kAcross ? Of::place(depths * 8 + lane() % 8, first_line / 8 + lines)
                                        : Of::place(first_line + lines * 8 + lane() % 8, depths));
  }

  /// Of 16 lines i, 16 numbers of the half of the step.
  __device__ void load(uint32_t (&to)[4], uint32_t stage, int i, int half) const {
    // What a constant changes in a place is bits of a chunk that `at_` has as zeros before they are permuted.
    if constexpr (kAcross)
      load_transposed(to, ((stage + at_) ^ static_cast<uint32_t>(i * 32)) + half * 16 * Of::kRowBytes);
    else
      load_matrices(to, ((stage + at_) ^ static_cast<uint32_t>(half * 32)) + i * 16 * Of::kRowBytes);
  }

 private:
  using Of = Stage<kLines, kAcross>;
  uint32_t at_;
};

/// Tiles of kPipelinedRows x kCols outputs, one after the other, by as many threads as a tile has columns: a warp has
/// 64 x 64. Copies of the next tile begin before the present one is stored.
template <DType kNumber, int kCols, bool kAcrossA, bool kAcrossB>
class Pipeline {
  static constexpr int kWarpTile = 64, kDown = kWarpTile / 16, kAcross = kWarpTile / 8;
  using StageA = Stage<kPipelinedRows, kAcrossA>;
  using StageB = Stage<kCols, kAcrossB>;
  static constexpr uint32_t kStageBytes = StageA::kBytes + StageB::kBytes, kLast = kPipelinedStages - 1;
  static_assert(kStageBytes * kPipelinedStages == pipelined_bytes(kCols));

 public:
  /// `memory`: of pipelined_bytes(), aligned to 128 bytes.
  __device__ explicit Pipeline(unsigned char* memory) : memory_(memory) {}

  /// Begins a tile: its first steps go to all stages but the last one, from which the tile before is stored.
  __device__ __forceinline__ void begin(const PipelinedOperand& a, int64_t row, const PipelinedOperand& b, int64_t col,
                                        int64_t contraction) {
    copies_of_a_ = {a, row, contraction};
    copies_of_b_ = {b, col, contraction};
    steps_ = static_cast<int>(ceil_div(contraction, int64_t{kPipelinedDepth}));
#pragma unroll
    for (uint32_t s = 0; s < kLast; ++s) copy(in_shared(memory_) + s * kStageBytes);
  }

  /// Multiplies what begin() was told. Then nobody uses a stage any more.
  __device__ __forceinline__ void multiply() {
#pragma unroll
    for (auto& of_rows : sums_)
#pragma unroll
      for (auto& sums : of_rows) sums[0] = sums[1] = sums[2] = sums[3] = 0;
    uint32_t read = in_shared(memory_), written = read + kLast * kStageBytes;
    next_is_there();
    load<0>(read, 0);
    for (int step = 0; step < steps_; ++step) {
      load<1>(read, 1);
      copy(written);  // beyond the last step: zeros
      written = after(written);
      multiply<0>();
      next_is_there();
      read = after(read);
      load<0>(read, 0);
      multiply<1>();
    }
    wait_for_copies<0>();
    __syncthreads();
  }

  /// Calls each(row, column, values) for kUnitOfCopies neighbouring outputs of the tile at a time.
  template <class Each>
  __device__ __forceinline__ void store(const Each& each) const {
    auto* const rows = reinterpret_cast<Row*>(memory_ + kLast * kStageBytes) + threadIdx.x / kWarp * kRows;
#pragma unroll
    for (int m = 0; m < kDown; ++m)
#pragma unroll
      for (int e = 0; e < 4; e += 2) {
        if (m > 0 || e > 0) __syncwarp();
#pragma unroll
        for (int n = 0; n < kAcross; ++n)
          *reinterpret_cast<float2*>(&rows[lane() / 4][n * 8 + lane() % 4 * 2]) = {sums_[m][n][e], sums_[m][n][e + 1]};
        __syncwarp();
#pragma unroll 1
        for (int at = lane(); at < kRows * kAcross; at += kWarp) {
          const auto* const from = reinterpret_cast<const float4*>(&rows[at / kAcross][at % kAcross * kUnitOfCopies]);
          const float4 low = from[0], high = from[1];
          each(down() + m * 16 + e / 2 * kRows + at / kAcross, across() + at % kAcross * kUnitOfCopies,
               {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w});
        }
      }
  }

 private:
  /// Outputs of a row of a warp, which stores kRows rows at a time. Eight more, so that what lanes write together lies
  /// in different banks.
  using Row = float[kWarpTile + 8];
  static constexpr int kRows = 8;
  static_assert(sizeof(Row) * kRows * kCols / kWarp <= kStageBytes);

  /// Where this warp's outputs begin in the tile.
  static __device__ int down() { return static_cast<int>(threadIdx.x) / kWarp % 2 * kWarpTile; }
  static __device__ int across() { return static_cast<int>(threadIdx.x) / (2 * kWarp) * kWarpTile; }

  __device__ void copy(uint32_t stage) {
    copies_of_a_.next(stage);
    copies_of_b_.next(stage + StageA::kBytes);
    end_copies();
  }
  __device__ uint32_t after(uint32_t stage) const {
    const uint32_t begin = in_shared(memory_);
    return stage == begin + kLast * kStageBytes ? begin : stage + kStageBytes;
  }
  /// The next step has arrived, and nobody reads the one before the last any more.
  static __device__ void next_is_there() {
    wait_for_copies<kPipelinedStages - 2>();
    __syncthreads();
  }

  template <int kBuffer>
  __device__ void load(uint32_t stage, int half) {
    const StageLoads<kPipelinedRows, kAcrossA, true> of_a(down());
    const StageLoads<kCols, kAcrossB, false> of_b(across());
#pragma unroll
    for (int m = 0; m < kDown; ++m) of_a.load(a_[kBuffer][m], stage, m, half);
#pragma unroll
    for (int n = 0; n < kAcross / 2; ++n) of_b.load(b_[kBuffer][n], stage + StageA::kBytes, n, half);
  }

  template <int kBuffer>
  __device__ void multiply() {
#pragma unroll
    for (int m = 0; m < kDown; ++m)
#pragma unroll
      for (int n = 0; n < kAcross; ++n) {
        const uint32_t low = b_[kBuffer][n / 2][n % 2 * 2], high = b_[kBuffer][n / 2][n % 2 * 2 + 1];
        if constexpr (kNumber == DType::bf16)
          multiply_add(sums_[m][n], a_[kBuffer][m], low, high);
        else
          multiply_add_f16(sums_[m][n], a_[kBuffer][m], low, high);
      }
  }

  unsigned char* memory_;
  StageCopies<kCols, kPipelinedRows, kAcrossA> copies_of_a_;
  StageCopies<kCols, kCols, kAcrossB> copies_of_b_;
  int steps_;
  float sums_[kDown][kAcross][4];
  uint32_t a_[2][kDown][4], b_[2][kAcross / 2][4];  ///< of two halves of steps
};

}  // namespace quire::cuda
