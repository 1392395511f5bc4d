// Counts of what quantization did to values, for investigations.
#pragma once

#include <cstdint>

namespace quire {

/// What became of the elements of one side. Counted are the values that are encoded: columnwise under the Hadamard
/// transform these are the transformed ones, whole groups of 16 tokens.
struct Statistics {
  int64_t elements = 0;
  int64_t saturated = 0;    ///< finite, and times its scale more than half a step above the largest element value
  int64_t underflowed = 0;  ///< finite and not 0, but the code is that of 0
  int64_t nonfinite = 0;    ///< NaN or infinite
};

}  // namespace quire
