// Products of bytes without VNNI, on top of AVX2: summed in int16, two sums a lane. Bytes of 4-bit codes are small: a
// block of 16 comes to 2304 at most in each sum, and as much again where it starts.

#include "quire/cpu/simd/avx2_bytes.h"

/// Rows of a micro-tile of bytes, and of those up to which its sums are kept in registers: columns of a block, which
/// are needed for every row, take half of the registers.
constexpr int kInt8Rows = 16, kInt8RegisterRows = 2;

/// Sums of products of bytes, what a row keeps of where they start, and what they come to.
typedef int16_t Products __attribute__((vector_size(4 * kLanes), aligned(1)));
inline I32 kept_start(I32 start) { return start & 0xFFFF; }  // in the first of the two sums
inline I32 total(Products sum) {
  return reinterpret_cast<I32>(_mm256_madd_epi16(reinterpret_cast<__m256i>(sum), _mm256_set1_epi16(1)));
}

/// sum + the products of four bytes each, those of x without sign.
inline Products dot(Products sum, Bytes x, Bytes y) {
  return sum +
         reinterpret_cast<Products>(_mm256_maddubs_epi16(reinterpret_cast<__m256i>(x), reinterpret_cast<__m256i>(y)));
}
