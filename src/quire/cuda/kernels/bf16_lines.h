// Operands in codes that are decoded to bfloat16 in memory, and products of them.
#pragma once

#include "quire/cuda/kernels/gemm.h"

namespace quire::cuda {

/// Lines of an operand as numbers along its contraction, from multiples of 16 bytes on, with zeros up to a multiple of
/// 8 of them. Where groups are contracted, each has numbers of a line for itself (bf16_group()).
struct Bf16Lines {
  unsigned char* data = nullptr;
  int64_t row_bytes = 0;
};

/// Numbers that each line has: of one tensor, or of `groups` whose rows are lines or (columnwise) contracted.
constexpr int64_t bf16_numbers(const Operand& o, int64_t groups) {
  constexpr int64_t block = 16;  // groups of columnwise_tokens() too are rounded up to it
  if (o.direction == Direction::rowwise || groups == 0) return round_up(o.contraction, int64_t{8});
  return round_up(o.contraction, block) + block * groups;
}

/// Where the numbers of a group begin in each line, if groups are contracted.
constexpr int64_t bf16_group(int64_t group, int64_t begin) { return round_up(begin, int64_t{16}) + 16 * group; }

/// Decodes an operand. Scales of bytes are multiplied into codes; the numbers of a unit lie as bf16_codes.cuh says.
struct DecodeJob {
  GroupedOperand from;
  Bf16Lines to;
};

/// Lines and numbers of them that a block decodes at a time, by two threads for each line, and blocks of a
/// multiprocessor.
inline constexpr int64_t kDecodeLines = 64, kDecodeNumbers = 512;
inline constexpr int kDecodeBlocks = 5;

/// In tiles of the pipeline, with a factor for each of their lines beside its shared memory.
struct Bf16GemmJob {
  GemmJob codes;
  Bf16Lines a, b;
};
constexpr unsigned bf16_gemm_bytes(int cols) {
  return pipelined_bytes(cols) + static_cast<unsigned>((kPipelinedRows + cols) * static_cast<int>(sizeof(float)));
}

}  // namespace quire::cuda
