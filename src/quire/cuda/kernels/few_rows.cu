// Products of few rows, which read each code of the columns once: a block takes 32 columns, one for each lane, and its
// warps take parts of the contraction. What they share are whole cuts of numerics.md 7.4, which are then added in
// order: so the bits are those of decode32, whatever the number of rows.
#include "quire/cuda/kernels/codes.cuh"

using namespace quire;
using namespace quire::cuda;

namespace {

constexpr int kColumns = kFewRowsColumns, kWarps = kFewRowsWarps;
constexpr int kPiece = 32;     ///< codes of a column that a thread has in registers
constexpr int kHalf = 16;      ///< the shortest cut
constexpr int kShortest = 64;  ///< codes that a warp takes at least, of one or more cuts
constexpr int kMostCuts = kShortest / kHalf;

template <int kRows>
struct Memory {
  SharedProduct product;
  CodeLine lines[kRows];  ///< of x
  alignas(16) float x[kWarps][kRows][kPiece];
  float x_scale[kWarps][2][kRows];                 ///< of each half of the piece
  float sums[kWarps][kMostCuts][kRows][kColumns];  ///< of whole cuts, with their scales
};

/// Codes of a column that are multiplied together.
struct Piece {
  uint4 low, high;

  __device__ void read(const CodeLine& line, int64_t at) {
    low = line.words(line.packed() ? at / 8 : at / 4);
    if (!line.packed()) high = line.words(at / 4 + 4);
  }
  /// The k-th; its upper bits are others'. k is known when this is compiled.
  __device__ uint32_t code(bool packed, int k) const {
    const uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    return packed ? words[k / 8] >> 4 * (k % 8) : words[k / 4] >> 8 * (k % 4);
  }
};

/// A part of the contraction: `first` of a round for the first warp, `each` for each warp.
struct Share {
  int64_t contraction, cut, each;

  __device__ explicit Share(const OneProduct& p)
      : contraction(p.a.contraction), cut(cut_of(p)), each(cut > kShortest ? cut : kShortest) {}
  __device__ int64_t round() const { return each * kWarps; }
  /// The piece of this warp after the one at `at`, which may be beyond the end.
  __device__ int64_t after(int64_t at) const {
    const int64_t next = at + kPiece;
    return (next & (each - 1)) == 0 ? next + round() - each : next;
  }
};

template <int kRows>
struct Columns {
  const OneProduct& p;
  Memory<kRows>& m;
  Share share;
  CodeLine line;
  Decoder of_x, of_w;
  int64_t row, col;  ///< the first row, and the column of this lane
  int warp = threadIdx.x / kColumns, lane = threadIdx.x % kColumns;

  __device__ Columns(const OneProduct& product, Memory<kRows>& memory, int64_t first_row, int64_t column)
      : p(product),
        m(memory),
        share(product),
        line(product.b, column),
        of_x(product.a.from.spec.element),
        of_w(product.b.from.spec.element),
        row(first_row),
        col(column) {}

  /// Rows of x at a piece, by this warp for itself.
  __device__ void stage(int64_t at) const {
    __syncwarp();
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const CodeLine& from = m.lines[r];
      const int64_t l = at + lane;
      const uint32_t word = from.word(from.packed() ? l / 8 : l / 4);
      const uint32_t code = from.packed() ? word >> 4 * (l % 8) : word >> 8 * (l % 4);
      m.x[warp][r][lane] = l < share.contraction ? of_x(code) : 0.0f;
    }
    for (int i = lane; i < 2 * kRows; i += kColumns)
      m.x_scale[warp][i / kRows][i % kRows] = scale_at(p.a, row + i % kRows, at + i / kRows * kHalf);
    __syncwarp();
  }

  /// Sums of the products of a piece, and of the cuts that end in it.
  __device__ void multiply(const Piece& piece, int64_t at, float (&sum)[kRows]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int k = half * kHalf; k < (half + 1) * kHalf; k += 4) {
        float w[4];
#pragma unroll
        for (int c = 0; c < 4; ++c)
          w[c] = at + k + c < share.contraction ? of_w(piece.code(line.packed(), k + c)) : 0.0f;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const float4 x = *reinterpret_cast<const float4*>(&m.x[warp][r][k]);
          sum[r] = __fmaf_rn(x.x, w[0], sum[r]);
          sum[r] = __fmaf_rn(x.y, w[1], sum[r]);
          sum[r] = __fmaf_rn(x.z, w[2], sum[r]);
          sum[r] = __fmaf_rn(x.w, w[3], sum[r]);
        }
      }
      const int64_t begin = at + half * kHalf, end = begin + kHalf;
      if ((end & (share.cut - 1)) != 0 && end < share.contraction) continue;
      const float scale = scale_at(p.b, col, begin);
      const int64_t slot = (begin & (share.each - 1)) / share.cut;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        // Behind the end of the contraction there is a half that ends no cut.
        if (begin < share.contraction) m.sums[warp][slot][r][lane] = sum[r] * m.x_scale[warp][half][r] * scale;
        sum[r] = 0;
      }
    }
  }

  /// Adds the cuts of a round in their order: a row by each warp.
  __device__ void add_cuts(int64_t round, float& all) const {
    const int cuts = static_cast<int>(share.each / share.cut);
    for (int c = 0; c < kWarps * cuts && round + c * share.cut < share.contraction; ++c)
      all += m.sums[c / cuts][c % cuts][warp][lane];
  }

  __device__ void run() const {
    __syncthreads();
    if (threadIdx.x < kRows) m.lines[threadIdx.x] = CodeLine(p.a, row + threadIdx.x);
    __syncthreads();
    float sum[kRows] = {}, all = 0;
    int64_t at = warp * share.each;
    Piece next{};
    next.read(line, at);
    for (int64_t round = 0; round < share.contraction; round += share.round()) {
      for (const int64_t end = round + (warp + 1) * share.each; at < end && at < share.contraction;) {
        const Piece piece = next;
        const int64_t now = at;
        at = share.after(at);
        next.read(line, at);
        stage(now);
        multiply(piece, now, sum);
      }
      __syncthreads();
      if (warp < kRows) add_cuts(round, all);
      __syncthreads();
    }
    if (warp < kRows && row + warp < p.to.out.rows && col < p.to.out.cols)
      p.to.store(row + warp, col, finished(p, row + warp, col, all));
  }
};

template <int kRows>
__device__ void multiply_few_rows(const GemmJob& job) {
  __shared__ Memory<kRows> memory;
  each_product(job, [&](const OneProduct& one) {
    const OneProduct& p = memory.product.hold(one);
    const int64_t blocks = ceil_div(p.to.out.cols, int64_t{kColumns});
    for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x)
      for (int64_t row = 0; row < p.to.out.rows; row += kRows)
        Columns<kRows>(p, memory, row, block * kColumns + threadIdx.x % kColumns).run();
  });
}

}  // namespace

extern "C" {

__global__ void __launch_bounds__(kFewRowsThreads, 1) few_rows_1(const __grid_constant__ GemmJob job) {
  multiply_few_rows<1>(job);
}
__global__ void __launch_bounds__(kFewRowsThreads, 1) few_rows_2(const __grid_constant__ GemmJob job) {
  multiply_few_rows<2>(job);
}
__global__ void __launch_bounds__(kFewRowsThreads, 1) few_rows_4(const __grid_constant__ GemmJob job) {
  multiply_few_rows<4>(job);
}
__global__ void __launch_bounds__(kFewRowsThreads, 1) few_rows_8(const __grid_constant__ GemmJob job) {
  multiply_few_rows<8>(job);
}

}  // extern "C"
