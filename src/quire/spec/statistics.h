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
  float amax = 0;           ///< the largest magnitude of a finite value
  int64_t measured = 0;     ///< finite, and the code stands for a finite value too
  double squares = 0;       ///< of those: the sum of their squares
  double errors = 0;        ///< of those: the sum of the squared differences from what the codes stand for

  Statistics& operator+=(const Statistics& more) {
    elements += more.elements;
    saturated += more.saturated;
    underflowed += more.underflowed;
    nonfinite += more.nonfinite;
    if (more.amax > amax) amax = more.amax;
    measured += more.measured;
    squares += more.squares;
    errors += more.errors;
    return *this;
  }
};

}  // namespace quire
