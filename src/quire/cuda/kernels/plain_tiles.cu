// Plain products by tensor cores, in bfloat16 and in float16: tiles of outputs from operands of any dtype, or from
// codes that become numbers of it on the way. Products of two numbers are exact; the tensor cores sum them, within cuts
// of numerics.md 7.4. An output's bits depend neither on the tile nor on other outputs.
#include "quire/cuda/kernels/plain.cuh"
#include "quire/cuda/kernels/tensor_sums.cuh"

using namespace quire;
using namespace quire::cuda;

namespace {

constexpr int kDepth = 32;                    ///< of a step
constexpr int kHalves = 2;                    ///< of a step: instructions multiply 16 numbers
constexpr int kSteps = kLongestCut / kDepth;  ///< of a cut

template <int kTile>
struct Memory {
  /// Of two steps, of which one is multiplied while the next one is written.
  alignas(128) unsigned char numbers[2][2][kTile * kDepth * 2];  ///< [step][a or b]
  RowStart starts[2][kTile];                                     ///< of a's and b's lines, where they are rows
  PlainMemory plain;
};

/// What a block has of an operand in a step: kTile lines, each with kDepth numbers (as rows of 64 bytes), or kDepth
/// rows with a number of each line. Neighbouring rows have their chunks of 16 bytes in different banks.
template <int kTile, DType kNumber>
class Side {
 public:
  static constexpr int kEach = kTile * kDepth / kUnit / (2 * kTile);  ///< units of a thread
  using Units = uint4[kEach];

  __device__ Side(const RowLayout& layout, const RowStart* starts, int64_t first_line)
      : layout_(layout), starts_(starts), first_(first_line) {}

  __device__ void fetch(Units& to, int64_t depth) const {
    constexpr int in_row = kTile / kUnit;
    const bool across = layout_.across();
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const RowStart start = across ? layout_.row(depth + unit(i) / in_row) : starts_[unit(i) / 4];
      to[i] = layout_.read<kNumber>(start, across ? first_ + unit(i) % in_row * kUnit : depth + unit(i) % 4 * kUnit);
    }
  }
  __device__ void put(const Units& from, unsigned char* memory) const {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      constexpr int in_row = kTile / kUnit;
      const int at =
          layout_.across() ? place_across(unit(i) / in_row, unit(i) % in_row) : place_along(unit(i) / 4, unit(i) % 4);
      *reinterpret_cast<uint4*>(memory + at) = layout_.pairs<kNumber>(from[i]);
    }
  }

  /// Four matrices of 8 x 8, two along the lines from `line` on by two along the half of the contraction. `by_lines`:
  /// the first two are neighbours along the lines, else along the contraction.
  __device__ void load(uint32_t (&to)[4], uint32_t memory, int line, int half, bool by_lines) const {
    const int lane = cuda::lane(), first = lane / 8 % 2, second = lane / 16;
    const int lines = by_lines ? first : second, depths = by_lines ? second : first;
    if (layout_.across())
      load_transposed(to, memory + place_across(half * 16 + depths * 8 + lane % 8, line / 8 + lines));
    else
      load_matrices(to, memory + place_along(line + lines * 8 + lane % 8, half * 2 + depths));
  }

 private:
  static __device__ int unit(int i) { return static_cast<int>(threadIdx.x) + i * 2 * kTile; }
  static __device__ int place_along(int line, int chunk) { return line * 64 + ((chunk ^ (line >> 1 & 3)) * 16); }
  static __device__ int place_across(int row, int chunk) { return row * 2 * kTile + ((chunk ^ (row & 7)) * 16); }

  const RowLayout& layout_;
  const RowStart* starts_;
  int64_t first_;
};

template <int kTile, DType kNumber>
class Tile {
 public:
  using Sums = TensorSums<kTile>;
  static_assert(Sums::stored_bytes() <= sizeof(Memory<kTile>::numbers));

  __device__ Tile(Memory<kTile>& memory, int64_t row, int64_t col)
      : m_(memory),
        row_(row),
        col_(col),
        a_(memory.plain.layout(0), memory.starts[0], row),
        b_(memory.plain.layout(1), memory.starts[1], col) {}

  __device__ __forceinline__ void run() {
    const OnePlainProduct& p = m_.plain.product();
    const int side = static_cast<int>(threadIdx.x) / kTile, line = static_cast<int>(threadIdx.x) % kTile;
    if (const RowLayout& layout = m_.plain.layout(side); !layout.across())
      m_.starts[side][line] = layout.row((side == 0 ? row_ : col_) + line);
    __syncthreads();  // that is there, and nobody stores the tile before any more
    const auto steps = static_cast<int>(ceil_div(p.contraction, int64_t{kDepth}));
    for (int step = 0; step <= steps; ++step) {  // one is fetched while the one before is multiplied
      typename Side<kTile, kNumber>::Units a, b;
      const bool more = step < steps;
      if (more) a_.fetch(a, int64_t{step} * kDepth), b_.fetch(b, int64_t{step} * kDepth);
      if (step > 0) {
        __syncthreads();
        multiply((step - 1) % 2);
        if (!more || step % kSteps == 0) sums_.end_cut();
      }
      if (more) a_.put(a, m_.numbers[step % 2][0]), b_.put(b, m_.numbers[step % 2][1]);
    }
    const int column = Sums::stored_column();
    sums_.store(m_.numbers, [&](int line, float sum) {
      if (row_ + line < p.to.out.rows && col_ + column < p.to.out.cols)
        store_plain(p.to, row_ + line, col_ + column, sum);
    });
  }

 private:
  __device__ void multiply(int buffer) {
    const uint32_t of_a = in_shared(m_.numbers[buffer][0]), of_b = in_shared(m_.numbers[buffer][1]);
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      uint32_t a[Sums::kDown][4], b[Sums::kAcross / 2][4];
#pragma unroll
      for (int m = 0; m < Sums::kDown; ++m) a_.load(a[m], of_a, Sums::down() + m * 16, half, true);
#pragma unroll
      for (int n = 0; n < Sums::kAcross / 2; ++n) b_.load(b[n], of_b, Sums::across() + n * 16, half, false);
#pragma unroll
      for (int m = 0; m < Sums::kDown; ++m)
#pragma unroll
        for (int n = 0; n < Sums::kAcross; ++n)
          add(sums_.cut[m][n], a[m], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
    }
  }
  static __device__ void add(float (&sum)[4], const uint32_t (&a)[4], uint32_t low, uint32_t high) {
    if constexpr (kNumber == DType::bf16)
      multiply_add(sum, a, low, high);
    else
      multiply_add_f16(sum, a, low, high);
  }

  Memory<kTile>& m_;
  int64_t row_, col_;
  Side<kTile, kNumber> a_, b_;
  Sums sums_;
};

/// The tiles of this block, of every product of a job.
template <int kTile, DType kNumber>
__device__ void multiply_tiles(const MatmulJob& job) {
  __shared__ Memory<kTile> memory;
  memory.plain.each_held(job, [&] {
    const MutableMatrix& out = memory.plain.product().to.out;
    const int64_t across = ceil_div(out.cols, int64_t{kTile}), down = ceil_div(out.rows, int64_t{kTile});
    for (int64_t t = blockIdx.x; t < across * down; t += gridDim.x)
      Tile<kTile, kNumber>(memory, t / across * kTile, t % across * kTile).run();
  });
}

}  // namespace

extern "C" {

__global__ void __launch_bounds__(2 * kTensorTile, 3) plain_bf16_64(const __grid_constant__ MatmulJob job) {
  multiply_tiles<kTensorTile, DType::bf16>(job);
}
__global__ void __launch_bounds__(2 * kTensorTile, 3) plain_f16_64(const __grid_constant__ MatmulJob job) {
  multiply_tiles<kTensorTile, DType::f16>(job);
}
__global__ void __launch_bounds__(2 * kLargeTensorTile, 1) plain_bf16_128(const __grid_constant__ MatmulJob job) {
  multiply_tiles<kLargeTensorTile, DType::bf16>(job);
}
__global__ void __launch_bounds__(2 * kLargeTensorTile, 1) plain_f16_128(const __grid_constant__ MatmulJob job) {
  multiply_tiles<kLargeTensorTile, DType::f16>(job);
}

}  // extern "C"
