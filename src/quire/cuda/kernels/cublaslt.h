// What the host asks the kernels of cublaslt.cu for: what cuBLASLt reads beside codes.
#pragma once

#include "quire/spec/problem.h"

namespace quire::cuda {

/// Scales of an operand with a scale for each block, in the order that cuBLASLt reads them in: bytes swizzled
/// (numerics.md 4.5); those of tiles of 128 x 128 as without that, but in rows of a multiple of four. What belongs to
/// no block is 0.
struct ScalesJob {
  Operand from;
  int64_t lines = 0;    ///< of scales, in `to`
  int64_t entries = 0;  ///< of a line of `to`
  void* to = nullptr;
};

/// What NVFP4's sums are multiplied by, and the addend is.
struct FactorsJob {
  Operand a, b;
  bool has_addend = false;
  float* to = nullptr;  ///< two
};

}  // namespace quire::cuda
