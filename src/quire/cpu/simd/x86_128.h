// Words of 128 bits, which AVX2 and AVX-512 share.

typedef int16_t I16x8 __attribute__((vector_size(16), aligned(2)));
typedef int32_t I32x4 __attribute__((vector_size(16), aligned(4)));

/// Largest lane, none of them negative.
inline int16_t largest_lane(I16x8 v) {
  // What exists is the smallest of unsigned lanes.
  const __m128i flipped = _mm_xor_si128(reinterpret_cast<__m128i>(v), _mm_set1_epi16(-1));
  return static_cast<int16_t>(~_mm_cvtsi128_si32(_mm_minpos_epu16(flipped)));
}
inline int32_t largest_lane(I32x4 v) {
  const __m128i a = reinterpret_cast<__m128i>(v);
  const __m128i b = _mm_max_epi32(a, _mm_shuffle_epi32(a, 0x4E));
  return _mm_cvtsi128_si32(_mm_max_epi32(b, _mm_shuffle_epi32(b, 0xB1)));
}

/// Whether multiply_add() takes no longer where a factor is subnormal. Intel's CPUs take a hundred cycles more.
inline bool has_quick_subnormals() { return __builtin_cpu_is("amd") != 0; }
