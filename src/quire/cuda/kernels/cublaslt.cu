#include "quire/cuda/kernels/cublaslt.h"

#include "quire/cuda/kernels/bf16_codes.cuh"
#include "quire/cuda/kernels/threads.cuh"
#include "quire/spec/product.h"

using namespace quire;
using namespace quire::cuda;

namespace {

/// Reads kUnit codes that follow each other in memory. The decoder writes codes 0, 4, 1, 5, 2, 6, 3, 7 of what it is
/// given, which therefore has them in the order 0, 2, 4, 6, 1, 3, 5, 7.
template <bool kPacked>
__device__ RawUnit read_in_order(const void* data, int64_t unit) {
  if constexpr (kPacked) {
    const uint32_t codes = static_cast<const uint32_t*>(data)[unit];
    const auto every_second = [](uint32_t nibbles) {
      nibbles &= 0x0F0F0F0Fu;
      nibbles = (nibbles | nibbles >> 4) & 0x00FF00FFu;
      return (nibbles | nibbles >> 8) & 0xFFFFu;
    };
    return {every_second(codes) | every_second(codes >> 4) << 16, 0, 0};
  } else {
    const uint2 codes = static_cast<const uint2*>(data)[unit];
    return {__byte_perm(codes.x, codes.y, 0x6420), __byte_perm(codes.x, codes.y, 0x7531), 0};
  }
}

/// Scales of an operand's blocks.
struct BlockScales {
  SideGrid grid;
  const uint8_t* bytes;

  __device__ uint8_t operator()(int64_t line, int64_t block) const { return bytes[scale_index(grid, line, block)]; }
};

/// Codes of 8 neighbouring lines under the scale of each.
__device__ void scale_lines(uint4& numbers, const Bf16Decoder& decoder, const BlockScales& scales, int64_t line,
                            int64_t block) {
  const auto of = [&](int i) { return decoder.scale_bits(scales(line + i, block)); };
  numbers.x = times(numbers.x, of(0) | of(1) << 16);
  numbers.y = times(numbers.y, of(2) | of(3) << 16);
  numbers.z = times(numbers.z, of(4) | of(5) << 16);
  numbers.w = times(numbers.w, of(6) | of(7) << 16);
}

/// kAgainst: lines of the operand run against memory, whose rows have one code of each line.
template <bool kPacked, bool kAgainst>
__device__ void decode_rows(const Bf16Job& job) {
  const Operand& o = job.from;
  const bool scaled = has_byte_scales(o.spec);
  const Bf16Decoder decoder(o.spec, scaled && !kAgainst);
  const BlockScales scales{{o.spec, o.direction, o.outer, block_count(o.spec, o.contraction)},
                           static_cast<const uint8_t*>(o.scale)};
  const int shift = scaled ? __ffs(static_cast<int>(o.spec.row().block)) - 1 : 0;
  const int64_t rows = kAgainst ? o.contraction : o.outer;
  const int units = static_cast<int>((kAgainst ? o.outer : o.contraction) / kUnit);
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x)
#pragma unroll 2
    for (int unit = static_cast<int>(threadIdx.x); unit < units; unit += kBf16Threads) {
      RawUnit raw = read_in_order<kPacked>(o.data, row * units + unit);
      if (scaled && !kAgainst) raw.scale = scales(row, unit * kUnit >> shift);
      uint4 numbers = decoder.of<kPacked>(raw);
      if (kAgainst && scaled) scale_lines(numbers, decoder, scales, unit * kUnit, row >> shift);
      static_cast<uint4*>(job.to)[row * units + unit] = numbers;
    }
}

}  // namespace

extern "C" {

__global__ void arrange_scales(const __grid_constant__ ScalesJob job) {
  const Operand& o = job.from;
  const bool bytes = has_byte_scales(o.spec);
  const int64_t block = block_length(o.spec, o.contraction), blocks = block_count(o.spec, o.contraction);
  const int64_t lines = bytes ? o.outer : (o.outer + block - 1) / block;
  each_of(job.lines * job.entries, [&](int64_t n) {
    const int64_t i = n / job.entries, j = n % job.entries;
    const bool there = i < lines && j < blocks;
    const int64_t from = there ? scale_index({o.spec, o.direction, o.outer, blocks}, bytes ? i : i * block, j) : 0;
    if (bytes)
      static_cast<uint8_t*>(job.to)[swizzled_offset(i, j, blocks)] =
          there ? static_cast<const uint8_t*>(o.scale)[from] : uint8_t{0};
    else
      static_cast<float*>(job.to)[n] = there ? static_cast<const float*>(o.scale)[from] : 0.0f;
  });
}

__global__ void product_factors(const __grid_constant__ FactorsJob job) {
  const float constant = product_constant(job.a.spec, job.b.spec);
  job.to[0] = constant * OperandValues(job.a).line_factor(0) * OperandValues(job.b).line_factor(0);
  job.to[1] = job.has_addend ? 1.0f : 0.0f;
}

__global__ void bf16_operand(const __grid_constant__ Bf16Job job) {
  const bool packed = job.from.spec.packed(), against = blocks_first(job.from.spec, job.from.direction);
  if (packed)
    decode_rows<true, false>(job);
  else if (against)
    decode_rows<false, true>(job);
  else
    decode_rows<false, false>(job);
}

}  // extern "C"
