// Products of bytes without VNNI, on top of AVX2.

#include "quire/cpu/simd/avx2_bytes.h"
//
#include "quire/cpu/simd/int16_sums.h"

/// Rows of a micro-tile of bytes, and of those up to which its sums are kept in registers: columns of a block, which
/// are needed for every row, take half of the registers.
constexpr int kInt8Rows = 16, kInt8RegisterRows = 2;

/// What the sums of a lane come to.
inline I32 total(Products sum) {
  return reinterpret_cast<I32>(_mm256_madd_epi16(reinterpret_cast<__m256i>(sum), _mm256_set1_epi16(1)));
}
