// Products of bytes without VNNI, on top of AVX-512.

#include "quire/cpu/simd/avx512_bytes.h"
//
#include "quire/cpu/simd/int16_sums.h"

/// Rows of a micro-tile of bytes, and of any such tile up to which its sums are kept in registers.
constexpr int kInt8Rows = 16, kInt8RegisterRows = 4;

/// What the sums of a lane come to.
inline I32 total(Products sum) {
  return reinterpret_cast<I32>(_mm512_madd_epi16(reinterpret_cast<__m512i>(sum), _mm512_set1_epi16(1)));
}
