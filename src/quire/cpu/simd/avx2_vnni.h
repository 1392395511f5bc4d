// The words of AVX-VNNI on top of AVX2: four bytes a lane, multiplied and summed in int32.

#include "quire/cpu/simd/avx2_bytes.h"

/// Rows of a micro-tile of bytes, and of those up to which its sums are kept in registers.
constexpr int kInt8Rows = 4, kInt8RegisterRows = 4;

/// Sums of products of bytes, what a row keeps of where they start, and what they come to.
typedef I32 Products;
inline I32 kept_start(I32 start) { return start; }
inline I32 total(Products sum) { return sum; }

/// sum + the products of four bytes each, those of x without sign. The builtin, because AVX-512 VNNI has the
/// instruction too, under another name: so machines with that can test this file.
inline I32 dot(I32 sum, Bytes x, Bytes y) {
  typedef int V8 __attribute__((vector_size(4 * kLanes)));
  return reinterpret_cast<I32>(
      __builtin_ia32_vpdpbusd_v8si(reinterpret_cast<V8>(sum), reinterpret_cast<V8>(x), reinterpret_cast<V8>(y)));
}
