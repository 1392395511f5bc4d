// The vocabulary of AVX-512 (F, BW, VL, DQ): 16 lanes.

constexpr int kLanes = 16;
constexpr int kTileRows = 12;
constexpr int kTileVectors = 2;
constexpr int kRegisters = 32;

typedef float F32 __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef int32_t I32 __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef uint32_t U32 __attribute__((vector_size(4 * kLanes), aligned(4)));

inline F32 load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, F32 v) { _mm512_storeu_ps(p, v); }
inline F32 broadcast(float x) { return _mm512_set1_ps(x); }
inline F32 multiply_add(F32 a, F32 b, F32 c) { return _mm512_fmadd_ps(a, b, c); }

/// Whether any bit is set.
inline bool any(U32 v) { return _mm512_test_epi32_mask(reinterpret_cast<__m512i>(v), reinterpret_cast<__m512i>(v)); }

/// kLanes bytes, widened.
inline U32 load_u8(const uint8_t* p) {
  return reinterpret_cast<U32>(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

/// float16: exact widening; narrowing rounds to nearest even and keeps NaN quiet, as format/half.h.
inline F32 load_f16(const uint16_t* p) {
  // With a mask of all lanes, because g++ 12 takes the plain word for uninitialized.
  return _mm512_maskz_cvtph_ps(0xFFFF, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline void store_f16(uint16_t* p, F32 v) {
  const __m256i half = _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), half);
}

#include "quire/cpu/simd/x86_128.h"

typedef uint16_t U16 __attribute__((vector_size(4 * kLanes), aligned(2)));
typedef uint64_t U64 __attribute__((vector_size(4 * kLanes), aligned(4)));

/// The magnitude of x, or `limit` if that is smaller; anything up to the limit if x is NaN.
inline F32 limited_magnitude(F32 x, float limit) {
  constexpr int kSmallerMagnitude = 2, kSignCleared = 2 << 2;
  return _mm512_range_ps(x, _mm512_set1_ps(limit), kSmallerMagnitude | kSignCleared);
}

/// Products of the low 32 bits of each lane.
inline U64 multiply_low(U64 a, U64 b) {
  // As load_f16().
  return reinterpret_cast<U64>(
      _mm512_maskz_mul_epu32(0xFF, reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
}

/// Writes 64 aligned bytes past the caches; finish_streams() before others read them.
inline void stream_64(uint8_t* to, const uint8_t* from) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
}
inline void finish_streams() { _mm_sfence(); }

/// 2 kLanes bytes, widened.
inline U16 load_u8_words(const uint8_t* p) {
  return reinterpret_cast<U16>(_mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
}

/// kLanes words, widened; and the low halves of lanes that are below 65536.
inline U32 load_u16(const uint16_t* p) {
  return reinterpret_cast<U32>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
}
inline void store_u16(uint16_t* p, U32 v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(v)));
}

/// The upper halves of the lanes of two vectors.
inline void store_upper(uint16_t* p, U32 first, U32 second) {
  const __m512i odd = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25,
                                       23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  const __m512i a = reinterpret_cast<__m512i>(first), b = reinterpret_cast<__m512i>(second);
  _mm512_storeu_si512(p, _mm512_permutex2var_epi16(a, odd, b));
}

/// Bits of a where those of the mask are set, of b elsewhere.
inline U32 blend_bits(uint32_t mask, U32 a, U32 b) {
  constexpr int kMaskedAOrB = 0xCA;
  return reinterpret_cast<U32>(_mm512_ternarylogic_epi32(_mm512_set1_epi32(static_cast<int>(mask)),
                                                         reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b),
                                                         kMaskedAOrB));
}

/// 4 kLanes bfloat16, widened: words moved to the upper halves of lanes.
inline void load_bf16(const uint16_t* p, F32 (&v)[4]) {
  const __m512i low = _mm512_set_epi16(15, 0, 14, 0, 13, 0, 12, 0, 11, 0, 10, 0, 9, 0, 8, 0, 7, 0, 6, 0, 5, 0, 4, 0, 3,
                                       0, 2, 0, 1, 0, 0, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h) {
    const __m512i words = _mm512_loadu_si512(p + h * 2 * kLanes);
    v[2 * h] = reinterpret_cast<F32>(_mm512_maskz_permutexvar_epi16(0xAAAAAAAAu, low, words));
    v[2 * h + 1] = reinterpret_cast<F32>(_mm512_maskz_permutexvar_epi16(0xAAAAAAAAu, high, words));
  }
}

/// kLanes float16: bytes with their sign extended, moved up by kShift, and of that the bits that are set in kKept.
template <int kShift, uint16_t kKept>
inline F32 load_bytes_as_f16(const uint8_t* p) {
  const __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i moved = _mm256_slli_epi16(words, kShift);
  return _mm512_cvtph_ps(_mm256_and_si256(moved, _mm256_set1_epi16(static_cast<int16_t>(kKept))));
}

typedef uint8_t Bytes __attribute__((vector_size(4 * kLanes), aligned(1)));

/// A table of 16 bytes, and what it holds at each index (below 16).
inline Bytes repeat_table(const uint8_t* table) {
  return reinterpret_cast<Bytes>(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table))));
}
inline Bytes look_up(Bytes table, Bytes index) {
  return reinterpret_cast<Bytes>(
      _mm512_shuffle_epi8(reinterpret_cast<__m512i>(table), reinterpret_cast<__m512i>(index)));
}
/// The sums of the products of neighbours, x without sign and y with one.
inline U16 multiply_pairs(Bytes x, Bytes y) {
  return reinterpret_cast<U16>(_mm512_maddubs_epi16(reinterpret_cast<__m512i>(x), reinterpret_cast<__m512i>(y)));
}
/// The smaller of two bytes without sign.
inline Bytes smaller(Bytes x, Bytes y) {
  return reinterpret_cast<Bytes>(_mm512_min_epu8(reinterpret_cast<__m512i>(x), reinterpret_cast<__m512i>(y)));
}
/// The smaller of two words without sign.
inline U16 smaller(U16 x, U16 y) {
  return reinterpret_cast<U16>(_mm512_min_epu16(reinterpret_cast<__m512i>(x), reinterpret_cast<__m512i>(y)));
}
/// x - y, or 0 where y is larger.
inline U16 excess(U16 x, U16 y) {
  return reinterpret_cast<U16>(_mm512_subs_epu16(reinterpret_cast<__m512i>(x), reinterpret_cast<__m512i>(y)));
}
inline Bytes excess(Bytes x, Bytes y) {
  return reinterpret_cast<Bytes>(_mm512_subs_epu8(reinterpret_cast<__m512i>(x), reinterpret_cast<__m512i>(y)));
}

/// Words below 2^15 as bytes, 255 if they are above it, and bytes with the sign of words; in an order of their own.
inline Bytes low_bytes(U16 first, U16 second) {
  return reinterpret_cast<Bytes>(
      _mm512_packus_epi16(reinterpret_cast<__m512i>(first), reinterpret_cast<__m512i>(second)));
}
inline Bytes upper_bytes(U16 first, U16 second) {
  return reinterpret_cast<Bytes>(
      _mm512_packs_epi16(reinterpret_cast<__m512i>(first), reinterpret_cast<__m512i>(second)));
}
/// Stores bytes of two vectors in the order of the words.
inline void store_bytes_of_words(uint8_t* p, Bytes v) {
  const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  _mm512_storeu_si512(p, _mm512_permutexvar_epi64(order, reinterpret_cast<__m512i>(v)));
}

/// Lanes below 256 as bytes, and bytes with the sign of lanes; in an order of their own.
inline Bytes low_bytes(const U32 (&v)[4]) {
  const auto words = [&](int q) {
    return reinterpret_cast<U16>(
        _mm512_packus_epi32(reinterpret_cast<__m512i>(v[q]), reinterpret_cast<__m512i>(v[q + 1])));
  };
  return low_bytes(words(0), words(2));
}
inline Bytes upper_bytes(const U32 (&v)[4]) {
  const auto words = [&](int q) {
    return reinterpret_cast<U16>(
        _mm512_packs_epi32(reinterpret_cast<__m512i>(v[q]), reinterpret_cast<__m512i>(v[q + 1])));
  };
  return upper_bytes(words(0), words(2));
}
/// Stores bytes of four vectors in the order of the lanes.
inline void store_bytes_of_lanes(uint8_t* p, Bytes v) {
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm512_storeu_si512(p, _mm512_permutexvar_epi32(order, reinterpret_cast<__m512i>(v)));
}

/// The low bytes of four vectors, which are below 256, in order.
inline void store_u8(uint8_t* p, const U32 (&v)[4]) { store_bytes_of_lanes(p, low_bytes(v)); }

/// The low halves of the lanes of two vectors, in alternation.
inline U16 low_halves(U32 even, U32 odd) {
  constexpr __mmask32 kOdd = 0xAAAAAAAAu;
  return reinterpret_cast<U16>(
      _mm512_mask_blend_epi16(kOdd, reinterpret_cast<__m512i>(even), reinterpret_cast<__m512i>(odd << 16)));
}

/// Neighbouring words below 16 as a byte in each lane, the first one in its low bits.
inline U32 join_nibbles(U16 nibbles) {
  return reinterpret_cast<U32>(_mm512_madd_epi16(reinterpret_cast<__m512i>(nibbles), _mm512_set1_epi32(16 << 16 | 1)));
}
