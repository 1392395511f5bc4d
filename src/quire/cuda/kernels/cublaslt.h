// What the host asks the kernels of cublaslt.cu for: what cuBLASLt reads beside codes.
#pragma once

#include "quire/spec/problem.h"

namespace quire::cuda {

/// Scales of an operand in the order that cuBLASLt reads them in: bytes swizzled (numerics.md 4.5); those of tiles of
/// 128 x 128 as without that, but in rows of a multiple of four; that of a tensor alone. What belongs to no block is 0.
struct ScalesJob {
  Operand from;
  int64_t lines = 0;    ///< of scales, in `to`
  int64_t entries = 0;  ///< of a line of `to`
  void* to = nullptr;
};

/// What sums of codes are multiplied by, and the addend is.
struct FactorsJob {
  Operand a, b;
  bool has_addend = false;
  float* to = nullptr;  ///< two
};

/// Codes times the bytes of their scales as bfloat16, which lie in memory as the codes do. Rows of memory have a
/// multiple of 16 codes.
struct Bf16Job {
  Operand from;
  void* to = nullptr;  ///< aligned to 16 bytes, as codes are
};
inline constexpr unsigned kBf16Threads = 256;  ///< of a block, which decodes rows of memory

}  // namespace quire::cuda
