// The order of long sums in float32 (docs/moe.md): sixteen sums over every sixteenth term, then added by halves. Fixed,
// so that bits depend neither on threads nor on instruction sets, and wide enough for compilers to vectorise.
#pragma once

#include <cstdint>

namespace quire::cpu {

/// The sum of term(0) ... term(count - 1); 0 for none.
template <class Term>
float sum(int64_t count, Term&& term) {
  float s[16] = {};
  const int64_t whole = count / 16 * 16;
  for (int64_t i = 0; i < whole; i += 16)
    for (int64_t lane = 0; lane < 16; ++lane) s[lane] += term(i + lane);
  for (int64_t i = whole; i < count; ++i) s[i - whole] += term(i);
  for (int half = 8; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) s[lane] += s[lane + half];
  return s[0];
}

}  // namespace quire::cpu
