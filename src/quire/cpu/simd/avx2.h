// The vocabulary of AVX2 + FMA: 8 lanes.

constexpr int kLanes = 8;
constexpr int kTileRows = 6;
constexpr int kTileVectors = 2;

typedef float F32 __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef int32_t I32 __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef uint32_t U32 __attribute__((vector_size(4 * kLanes), aligned(4)));

inline F32 load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, F32 v) { _mm256_storeu_ps(p, v); }
inline F32 broadcast(float x) { return _mm256_set1_ps(x); }
inline F32 multiply_add(F32 a, F32 b, F32 c) { return _mm256_fmadd_ps(a, b, c); }

/// kLanes bytes, widened.
inline U32 load_u8(const uint8_t* p) {
  return reinterpret_cast<U32>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}

/// float16: exact widening; narrowing rounds to nearest even and keeps NaN quiet, as format/half.h.
inline F32 load_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline void store_f16(uint16_t* p, F32 v) {
  const __m128i half = _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), half);
}
