// Plain products of few rows by tensor cores, which read the columns' memory once: a block takes 16 columns, whose cuts
// of the contraction its warps share. A lane has the same part of the contraction of columns and of rows, as it lies in
// memory: instructions multiply any 16 places of it. Which warp sums a cut, and in which order warps are added, depends
// on the contraction alone; so a row's bits do not depend on the others.
#include "quire/cuda/kernels/plain.cuh"
#include "quire/cuda/kernels/tensor_sums.cuh"

using namespace quire;
using namespace quire::cuda;

namespace {

constexpr int kColumns = kPlainFewColumns, kWarps = kPlainFewThreads / kWarp;
constexpr int kPiece = kLongestCut / 4, kUnits = kPiece / kUnit;  ///< of a line and a lane in a cut
static_assert(kColumns == 16 && kMostFewRows == 16 && kPlainFewThreads == kColumns * kMostFewRows);

struct Memory {
  PlainMemory plain;
  RowStart columns[kColumns], rows[kMostFewRows];
  float sums[kWarps][kMostFewRows][kColumns + 1];
};

/// A lane's part of a line in a cut, of elements of kBits, which are codes unless they have the 16 of kNumber.
template <int kBits, DType kNumber>
struct Piece {
  static constexpr bool kCodes = kBits < 16;
  static constexpr int kVectors = kPiece * kBits / 128;

  uint4 vectors[kVectors];
  uint32_t scales[2];  ///< of each half, as stored

  __device__ void read(const RowLayout& layout, const RowStart& start, int64_t col) {
    if (layout.has_vectors(start, col, kPiece)) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i)
        vectors[i] = *reinterpret_cast<const uint4*>(start.at + (col * kBits / 8 + i * 16));
      if constexpr (kCodes)
        for (int half = 0; half < 2; ++half) scales[half] = layout.stored_scale(start, col + half * (kPiece / 2));
      return;
    }
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      if constexpr (kCodes) {
        const uint4 unit = layout.read_codes(start, col + u * kUnit);
        put<0>(u, unit.x);
        if constexpr (kBits == 8) put<1>(u, unit.y);
        if (u % 2 == 0) scales[u / 2] = unit.z;
      } else {
        vectors[u] = layout.template read_numbers<kNumber>(start, col + u * kUnit);
      }
    }
  }

  /// What multiplies the codes of a half.
  __device__ float scale(const RowLayout& layout, const RowStart& start, int half) const {
    return kCodes ? layout.scale_of(scales[half % 2], start.amax) : 1.0f;
  }
  /// Unit u as pairs of numbers, under the scale of its half.
  __device__ uint4 pairs(const RowLayout& layout, float scale, int u) const {
    if constexpr (kBits == 16) return vectors[u];
    if constexpr (kBits == 8) return layout.template pairs_of<kNumber, false>({get<0>(u), get<1>(u)}, scale);
    return layout.template pairs_of<kNumber, true>({get<0>(u), 0}, scale);
  }

 private:
  /// A word of unit u, which has one or two.
  template <int kWord>
  __device__ uint32_t get(int u) const {
    const int at = kBits == 8 ? 2 * u + kWord : u;
    const uint4& v = vectors[at / 4];
    return at % 4 == 0 ? v.x : at % 4 == 1 ? v.y : at % 4 == 2 ? v.z : v.w;
  }
  template <int kWord>
  __device__ void put(int u, uint32_t word) {
    const int at = kBits == 8 ? 2 * u + kWord : u;
    uint4& v = vectors[at / 4];
    (at % 4 == 0 ? v.x : at % 4 == 1 ? v.y : at % 4 == 2 ? v.z : v.w) = word;
  }
};

template <DType kNumber>
__device__ void add(float (&sum)[4], const uint32_t (&a)[4], uint32_t low, uint32_t high) {
  if constexpr (kNumber == DType::bf16)
    multiply_add(sum, a, low, high);
  else
    multiply_add_f16(sum, a, low, high);
}

/// Sums of a warp: 16 columns by 8 rows, and by the next 8 if there are more.
template <int kBits, DType kNumber>
__device__ void multiply_cuts(Memory& m) {
  const RowLayout &of_x = m.plain.layout(0), &of_w = m.plain.layout(1);
  const int64_t contraction = m.plain.product().contraction;
  const bool more = m.plain.product().to.out.rows > 8;
  const int warp = static_cast<int>(threadIdx.x) / kWarp, group = lane() / 4, part = lane() % 4 * kPiece;
  const RowStart *const w = m.columns + group, *const x = m.rows + group;
  float all[2][4] = {};
  Piece<kBits, kNumber> next[2];
  // What comes next is read while what is there is multiplied.
  for (int64_t cut = (warp - kWarps) * kLongestCut; cut < contraction; cut += kWarps * kLongestCut) {
    const Piece<kBits, kNumber> now[2]{next[0], next[1]};
    if (const int64_t after = cut + kWarps * kLongestCut; after < contraction)
      next[0].read(of_w, w[0], after + part), next[1].read(of_w, w[8], after + part);
    if (cut < 0) continue;
    float sum[2][4] = {};
    float first_scale, second_scale;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      if (u % 2 == 0) first_scale = now[0].scale(of_w, w[0], u / 2), second_scale = now[1].scale(of_w, w[8], u / 2);
      const uint4 first = now[0].pairs(of_w, first_scale, u), second = now[1].pairs(of_w, second_scale, u);
      const uint32_t low[4] = {first.x, second.x, first.y, second.y}, high[4] = {first.z, second.z, first.w, second.w};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (i == 1 && !more) continue;
        const uint4 row = of_x.read_numbers<kNumber>(x[8 * i], cut + part + u * kUnit);
        add<kNumber>(sum[i], low, row.x, row.y);
        add<kNumber>(sum[i], high, row.z, row.w);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) all[i][e] += sum[i][e];
  }
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) m.sums[warp][i * 8 + lane() % 4 * 2 + e % 2][group + e / 2 * 8] = all[i][e];
}

/// One output by each thread.
__device__ void store(const Memory& m, int64_t column) {
  const int row = static_cast<int>(threadIdx.x) / kColumns, col = static_cast<int>(threadIdx.x) % kColumns;
  const ProductOutput& to = m.plain.product().to;
  if (row >= to.out.rows || column + col >= to.out.cols) return;
  float sum = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += m.sums[w][row][col];
  store_plain(to, row, column + col, sum);
}

template <int kBits, DType kNumber>
__device__ void multiply_few_rows(const MatmulJob& job) {
  __shared__ Memory memory;
  memory.plain.each_held(job, [&] {
    const int64_t columns = memory.plain.product().to.out.cols;
    for (int64_t column = int64_t{blockIdx.x} * kColumns; column < columns; column += int64_t{gridDim.x} * kColumns) {
      const int thread = static_cast<int>(threadIdx.x);
      if (thread < kColumns) memory.columns[thread] = memory.plain.layout(1).row(column + thread);
      if (thread < kMostFewRows) memory.rows[thread] = memory.plain.layout(0).row(thread);
      __syncthreads();  // that is there, and nobody reads the sums of columns before any more
      multiply_cuts<kBits, kNumber>(memory);
      __syncthreads();
      store(memory, column);
    }
  });
}

}  // namespace

extern "C" {

__global__ void __launch_bounds__(kPlainFewThreads, 1) plain_few_bf16_4(const __grid_constant__ MatmulJob job) {
  multiply_few_rows<4, DType::bf16>(job);
}
__global__ void __launch_bounds__(kPlainFewThreads, 1) plain_few_bf16_8(const __grid_constant__ MatmulJob job) {
  multiply_few_rows<8, DType::bf16>(job);
}
__global__ void __launch_bounds__(kPlainFewThreads, 1) plain_few_bf16_16(const __grid_constant__ MatmulJob job) {
  multiply_few_rows<16, DType::bf16>(job);
}
__global__ void __launch_bounds__(kPlainFewThreads, 1) plain_few_f16_4(const __grid_constant__ MatmulJob job) {
  multiply_few_rows<4, DType::f16>(job);
}
__global__ void __launch_bounds__(kPlainFewThreads, 1) plain_few_f16_8(const __grid_constant__ MatmulJob job) {
  multiply_few_rows<8, DType::f16>(job);
}
__global__ void __launch_bounds__(kPlainFewThreads, 1) plain_few_f16_16(const __grid_constant__ MatmulJob job) {
  multiply_few_rows<16, DType::f16>(job);
}

}  // extern "C"
