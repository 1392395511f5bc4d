// Products of codes that have been decoded to bfloat16, by the pipeline of pipelined_product.cuh. Scales that no block
// changes multiply finished sums.
#include "quire/cuda/kernels/bf16_lines.cuh"
#include "quire/cuda/kernels/group_tiles.cuh"
#include "quire/cuda/kernels/pipelined_product.cuh"
#include "quire/cuda/kernels/unit_values.cuh"

using namespace quire;
using namespace quire::cuda;

namespace {

/// Sums with their scales, of neighbouring outputs of a row from a column on that is a multiple of kUnit.
__device__ void store_unit(const ProductOutput& to, int64_t row, int64_t col, UnitValues y) {
  const MutableMatrix& out = to.out;
  if (row >= out.rows || col >= out.cols) return;
  uint4* const vectors = vectors_of(out, row, col);
  if (!vectors) {
#pragma unroll
    for (int k = 0; k < kUnit; ++k)
      if (col + k < out.cols) to.store(row, col + k, y.v[k]);
    return;
  }
  if (to.bias.data) {
#pragma unroll
    for (int k = 0; k < kUnit; ++k) y.v[k] += load_element(to.bias.data, to.bias.dtype, col + k);
  }
  if (to.addend) {
#pragma unroll
    for (int k = 0; k < kUnit; ++k)
      y.v[k] = rounded(out.dtype, y.v[k]) + load_element(to.addend, out.dtype, row * out.row_stride + col + k);
  }
  store_vectors(vectors, out.dtype, y);
}

/// A product of a group, whose codes have been decoded.
struct DecodedProduct {
  OperandValues a, b;
  ProductOutput to;
  Bf16Lines of_a, of_b;

  __device__ DecodedProduct(const Bf16GemmJob& job, int64_t e, const GroupPlace& place)
      : a(operand_of(job.codes.a, e, place)),
        b(operand_of(job.codes.b, e, job.codes.b.groups[e])),
        to(output_of(job.codes.out, e, place, a.from.outer)),
        of_a(group_of(job.a, job.codes.a, e)),
        of_b(group_of(job.b, job.codes.b, e)) {}

  /// What no block changes, of the lines of a tile: a's, then b's. By kCols threads.
  template <int kCols>
  __device__ void put_factors(float* to, int64_t row, int64_t col) const {
    for (int i = static_cast<int>(threadIdx.x); i < kPipelinedRows; i += kCols) to[i] = factor(a, row + i);
    to[kPipelinedRows + threadIdx.x] = factor(b, col + threadIdx.x);
  }

 private:
  static __device__ float factor(const OperandValues& v, int64_t line) {
    return line < v.from.outer ? v.line_factor(line) : 0.0f;
  }
};

/// The next tile from number `t` on that has something to multiply, and its first copies. False: there is none.
template <int kCols, class Tiles, class ToBegin>
__device__ bool begin_next(const Bf16GemmJob& job, int64_t& t, Tiles& tiles, ToBegin& pipeline) {
  const GemmJob& codes = job.codes;
  for (; tiles.find(t); t += gridDim.x) {
    const GroupPlace place = codes.a.groups[tiles.group];
    if (codes.out.in_groups && place.rows == 0 && codes.out.addend) continue;  // nothing is added
    const DecodedProduct p(job, tiles.group, place);
    if (p.a.contraction != p.b.contraction) {
      if (threadIdx.x == 0 && tiles.row == 0 && tiles.col == 0)
        report_contraction(codes, p.a.contraction, p.b.contraction);
      continue;
    }
    pipeline.begin({p.of_a.data, p.of_a.row_bytes, p.a.from.outer}, tiles.row,
                   {p.of_b.data, p.of_b.row_bytes, p.b.from.outer}, tiles.col, p.a.contraction);
    t += gridDim.x;
    return true;
  }
  return false;
}

/// The tiles of this block, of every product of a job.
template <int kCols>
__device__ void multiply_codes(const Bf16GemmJob& job) {
  extern __shared__ __align__(128) unsigned char memory[];
  auto* const factors = reinterpret_cast<float*>(memory + pipelined_bytes(kCols));
  const GemmJob& codes = job.codes;
  const bool by_rows = codes.a.all.direction == Direction::rowwise;
  Pipeline<DType::bf16, kCols, false, false> pipeline(memory);
  GroupTiles<kPipelinedRows, kCols> tiles(codes.a.groups, codes.out.all.cols, by_rows ? -1 : codes.a.all.outer);
  int64_t t = blockIdx.x;
  for (bool more = begin_next<kCols>(job, t, tiles, pipeline); more;) {
    pipeline.multiply();
    const int64_t group = tiles.group, row = tiles.row, col = tiles.col;
    more = begin_next<kCols>(job, t, tiles, pipeline);
    const DecodedProduct p(job, group, codes.a.groups[group]);
    p.put_factors<kCols>(factors, row, col);
    __syncthreads();
    const float constant = product_constant(p.a.from.spec, p.b.from.spec);
    pipeline.store([&](int down, int across, UnitValues sums) {
#pragma unroll
      for (int k = 0; k < kUnit; ++k)
        sums.v[k] = sums.v[k] * constant * factors[down] * factors[kPipelinedRows + across + k];
      store_unit(p.to, row + down, col + across, sums);
    });
  }
}

}  // namespace

extern "C" {

__global__ void __launch_bounds__(128, 2) codes_128(const __grid_constant__ Bf16GemmJob job) {
  multiply_codes<128>(job);
}
__global__ void __launch_bounds__(256, 1) codes_256(const __grid_constant__ Bf16GemmJob job) {
  multiply_codes<256>(job);
}

}  // extern "C"
