// What the host asks the kernels of the self-check for: data of a small problem, and how many results of two rows
// differ.
#pragma once

#include "quire/base/matrix.h"
#include "quire/spec/fingerprint_rule.h"

namespace quire::cuda {

/// Numbers up to 8, of several magnitudes, rounded to the dtype; `positive`: without those below or at 0.
struct DrawJob {
  void* to;
  DType dtype;
  int64_t count;
  uint64_t seed;
  bool positive;
};

/// `slots` different ids for each token, of `experts`.
struct DrawIdsJob {
  int32_t* to;
  int64_t count;
  int64_t slots;
  int64_t experts;
};

/// Ends of groups that each have `step` rows; int32, or int64 where `wide`.
struct DrawEndsJob {
  void* to;
  int64_t count;
  int64_t step;
  bool wide;
};

/// Clears bits of every byte: the signs of codes.
struct ClearJob {
  uint8_t* bytes;
  int64_t count;
  uint8_t keep;
};

/// Numbers of the first `found` that are not those of `expected`. Without magnitudes they must be the same bytes; else
/// they may differ by `tolerance` of the magnitude, and by roundings to their dtype of numbers that bias and addend
/// make `offset` larger.
struct DifferJob {
  const void* found;
  const void* expected;
  DType dtype;
  int64_t count;
  const float* magnitudes;
  float tolerance;
  float offset;
  uint32_t* differing;  ///< is added to
};

}  // namespace quire::cuda
