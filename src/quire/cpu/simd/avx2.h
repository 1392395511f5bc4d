// The vocabulary of AVX2 + FMA: 8 lanes.

constexpr int kLanes = 8;
constexpr int kTileRows = 6;
constexpr int kTileVectors = 2;
constexpr int kRegisters = 16;

typedef float F32 __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef int32_t I32 __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef uint32_t U32 __attribute__((vector_size(4 * kLanes), aligned(4)));

inline F32 load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, F32 v) { _mm256_storeu_ps(p, v); }
inline F32 broadcast(float x) { return _mm256_set1_ps(x); }
inline F32 multiply_add(F32 a, F32 b, F32 c) { return _mm256_fmadd_ps(a, b, c); }

/// Whether any bit is set.
inline bool any(U32 v) { return !_mm256_testz_si256(reinterpret_cast<__m256i>(v), reinterpret_cast<__m256i>(v)); }

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

#include "quire/cpu/simd/x86_128.h"

typedef uint16_t U16 __attribute__((vector_size(4 * kLanes), aligned(2)));
typedef uint64_t U64 __attribute__((vector_size(4 * kLanes), aligned(4)));

/// The magnitude of x, or `limit` if that is smaller; anything up to the limit if x is NaN.
inline F32 limited_magnitude(F32 x, float limit) {
  return _mm256_min_ps(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), x), _mm256_set1_ps(limit));
}

/// Products of the low 32 bits of each lane.
inline U64 multiply_low(U64 a, U64 b) {
  return reinterpret_cast<U64>(_mm256_mul_epu32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
}

/// Writes 64 aligned bytes past the caches; finish_streams() before others read them.
inline void stream_64(uint8_t* to, const uint8_t* from) {
  const auto* lines = reinterpret_cast<const __m256i*>(from);
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), _mm256_loadu_si256(lines));
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to) + 1, _mm256_loadu_si256(lines + 1));
}
inline void finish_streams() { _mm_sfence(); }

/// 2 kLanes bytes, widened.
inline U16 load_u8_words(const uint8_t* p) {
  return reinterpret_cast<U16>(_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

/// kLanes words, widened; and the low halves of lanes that are below 65536.
inline U32 load_u16(const uint16_t* p) {
  return reinterpret_cast<U32>(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline void store_u16(uint16_t* p, U32 v) {
  const __m256i bits = reinterpret_cast<__m256i>(v);
  const __m256i low = _mm256_permute4x64_epi64(_mm256_packus_epi32(bits, bits), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(low));
}

/// The upper halves of the lanes of two vectors.
inline void store_upper(uint16_t* p, U32 first, U32 second) {
  const __m256i a = reinterpret_cast<__m256i>(first >> 16), b = reinterpret_cast<__m256i>(second >> 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xD8));
}

/// Bits of a where those of the mask are set, of b elsewhere.
inline U32 blend_bits(uint32_t mask, U32 a, U32 b) { return (a & mask) | (b & ~mask); }

/// 4 kLanes bfloat16, widened.
inline void load_bf16(const uint16_t* p, F32 (&v)[4]) {
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) v[q] = reinterpret_cast<F32>(load_u16(p + q * kLanes) << 16);
}

/// kLanes float16: bytes with their sign extended, moved up by kShift, and of that the bits that are set in kKept.
template <int kShift, uint16_t kKept>
inline F32 load_bytes_as_f16(const uint8_t* p) {
  const __m128i words = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const __m128i moved = _mm_slli_epi16(words, kShift);
  return _mm256_cvtph_ps(_mm_and_si128(moved, _mm_set1_epi16(static_cast<int16_t>(kKept))));
}

typedef uint8_t Bytes __attribute__((vector_size(4 * kLanes), aligned(1)));

/// A table of 16 bytes, and what it holds at each index (below 16).
inline Bytes repeat_table(const uint8_t* table) {
  return reinterpret_cast<Bytes>(_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table))));
}
inline Bytes look_up(Bytes table, Bytes index) {
  return reinterpret_cast<Bytes>(
      _mm256_shuffle_epi8(reinterpret_cast<__m256i>(table), reinterpret_cast<__m256i>(index)));
}
/// The sums of the products of neighbours, x without sign and y with one.
inline U16 multiply_pairs(Bytes x, Bytes y) {
  return reinterpret_cast<U16>(_mm256_maddubs_epi16(reinterpret_cast<__m256i>(x), reinterpret_cast<__m256i>(y)));
}
/// The smaller of two bytes without sign.
inline Bytes smaller(Bytes x, Bytes y) {
  return reinterpret_cast<Bytes>(_mm256_min_epu8(reinterpret_cast<__m256i>(x), reinterpret_cast<__m256i>(y)));
}
/// The smaller of two words without sign.
inline U16 smaller(U16 x, U16 y) {
  return reinterpret_cast<U16>(_mm256_min_epu16(reinterpret_cast<__m256i>(x), reinterpret_cast<__m256i>(y)));
}
/// x - y, or 0 where y is larger.
inline U16 excess(U16 x, U16 y) {
  return reinterpret_cast<U16>(_mm256_subs_epu16(reinterpret_cast<__m256i>(x), reinterpret_cast<__m256i>(y)));
}
inline Bytes excess(Bytes x, Bytes y) {
  return reinterpret_cast<Bytes>(_mm256_subs_epu8(reinterpret_cast<__m256i>(x), reinterpret_cast<__m256i>(y)));
}

/// Words below 2^15 as bytes, 255 if they are above it, and bytes with the sign of words; in an order of their own.
inline Bytes low_bytes(U16 first, U16 second) {
  return reinterpret_cast<Bytes>(
      _mm256_packus_epi16(reinterpret_cast<__m256i>(first), reinterpret_cast<__m256i>(second)));
}
inline Bytes upper_bytes(U16 first, U16 second) {
  return reinterpret_cast<Bytes>(
      _mm256_packs_epi16(reinterpret_cast<__m256i>(first), reinterpret_cast<__m256i>(second)));
}
/// Stores bytes of two vectors in the order of the words.
inline void store_bytes_of_words(uint8_t* p, Bytes v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(reinterpret_cast<__m256i>(v), 0xD8));
}

/// Lanes below 256 as bytes, and bytes with the sign of lanes; in an order of their own.
inline Bytes low_bytes(const U32 (&v)[4]) {
  const auto words = [&](int q) {
    return reinterpret_cast<U16>(
        _mm256_packus_epi32(reinterpret_cast<__m256i>(v[q]), reinterpret_cast<__m256i>(v[q + 1])));
  };
  return low_bytes(words(0), words(2));
}
inline Bytes upper_bytes(const U32 (&v)[4]) {
  const auto words = [&](int q) {
    return reinterpret_cast<U16>(
        _mm256_packs_epi32(reinterpret_cast<__m256i>(v[q]), reinterpret_cast<__m256i>(v[q + 1])));
  };
  return upper_bytes(words(0), words(2));
}
/// Stores bytes of four vectors in the order of the lanes.
inline void store_bytes_of_lanes(uint8_t* p, Bytes v) {
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i bytes = _mm256_permutevar8x32_epi32(reinterpret_cast<__m256i>(v), order);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), bytes);
}

/// The low bytes of four vectors, which are below 256, in order.
inline void store_u8(uint8_t* p, const U32 (&v)[4]) { store_bytes_of_lanes(p, low_bytes(v)); }

/// The low halves of the lanes of two vectors, in alternation.
inline U16 low_halves(U32 even, U32 odd) {
  return reinterpret_cast<U16>(
      _mm256_blend_epi16(reinterpret_cast<__m256i>(even), reinterpret_cast<__m256i>(odd << 16), 0xAA));
}

/// Neighbouring words below 16 as a byte in each lane, the first one in its low bits.
inline U32 join_nibbles(U16 nibbles) {
  return reinterpret_cast<U32>(_mm256_madd_epi16(reinterpret_cast<__m256i>(nibbles), _mm256_set1_epi32(16 << 16 | 1)));
}
