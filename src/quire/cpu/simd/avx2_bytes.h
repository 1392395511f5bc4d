// Words of bytes on top of AVX2, which both kinds of int8 lanes share.

inline Bytes load_bytes(const void* p) {
  return reinterpret_cast<Bytes>(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
}
inline void store_bytes(void* p, Bytes v) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), reinterpret_cast<__m256i>(v));
}
/// A lane repeated.
inline Bytes broadcast_bytes(const void* lane) {
  int32_t x;
  std::memcpy(&x, lane, sizeof x);
  return reinterpret_cast<Bytes>(_mm256_set1_epi32(x));
}

/// Puts the lanes of x and y in alternation: the first half of them into x, the rest into y.
inline void interleave_lanes(Bytes& x, Bytes& y) {
  const __m256i a = reinterpret_cast<__m256i>(x), b = reinterpret_cast<__m256i>(y);
  const __m256i low = _mm256_unpacklo_epi32(a, b), high = _mm256_unpackhi_epi32(a, b);
  x = reinterpret_cast<Bytes>(_mm256_permute2x128_si256(low, high, 0x20));
  y = reinterpret_cast<Bytes>(_mm256_permute2x128_si256(low, high, 0x31));
}
