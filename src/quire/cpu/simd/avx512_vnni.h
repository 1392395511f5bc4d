// The words of AVX-512 VNNI on top of AVX-512: four bytes a lane, multiplied and summed in int32.

#include "quire/cpu/simd/avx512_bytes.h"

/// Rows of a micro-tile of bytes, and of any such tile up to which its sums are kept in registers.
constexpr int kInt8Rows = 8, kInt8RegisterRows = 16;

/// Sums of products of bytes, what a row keeps of where they start, and what they come to.
typedef I32 Products;
inline I32 kept_start(I32 start) { return start; }
inline I32 total(Products sum) { return sum; }

/// sum + the products of four bytes each, those of x without sign.
inline I32 dot(I32 sum, Bytes x, Bytes y) {
  return reinterpret_cast<I32>(
      _mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum), reinterpret_cast<__m512i>(x), reinterpret_cast<__m512i>(y)));
}
