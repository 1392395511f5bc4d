// Products of bytes without VNNI, on top of AVX-512: summed in int16, two sums a lane, as in avx2_int8.h.

#include "quire/cpu/simd/avx512_bytes.h"

/// Rows of a micro-tile of bytes, and of any such tile up to which its sums are kept in registers.
constexpr int kInt8Rows = 16, kInt8RegisterRows = 4;

/// Sums of products of bytes, what a row keeps of where they start, and what they come to.
typedef int16_t Products __attribute__((vector_size(4 * kLanes), aligned(1)));
inline I32 kept_start(I32 start) { return start & 0xFFFF; }  // in the first of the two sums
inline I32 total(Products sum) {
  return reinterpret_cast<I32>(_mm512_madd_epi16(reinterpret_cast<__m512i>(sum), _mm512_set1_epi16(1)));
}

/// sum + the products of four bytes each, those of x without sign.
inline Products dot(Products sum, Bytes x, Bytes y) {
  return sum +
         reinterpret_cast<Products>(_mm512_maddubs_epi16(reinterpret_cast<__m512i>(x), reinterpret_cast<__m512i>(y)));
}
