// Words of bytes on top of AVX-512, which both kinds of int8 lanes share.

inline Bytes load_bytes(const void* p) { return reinterpret_cast<Bytes>(_mm512_loadu_si512(p)); }
inline void store_bytes(void* p, Bytes v) { _mm512_storeu_si512(p, reinterpret_cast<__m512i>(v)); }
/// A lane repeated.
inline Bytes broadcast_bytes(const void* lane) {
  int32_t x;
  std::memcpy(&x, lane, sizeof x);
  return reinterpret_cast<Bytes>(_mm512_set1_epi32(x));
}
inline I32 broadcast_int(const void* lane) { return reinterpret_cast<I32>(broadcast_bytes(lane)); }

/// Puts the lanes of x and y in alternation: the first half of them into x, the rest into y.
inline void interleave_lanes(Bytes& x, Bytes& y) {
  const __m512i order = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i later = _mm512_add_epi32(order, _mm512_set1_epi32(8));
  const __m512i a = reinterpret_cast<__m512i>(x), b = reinterpret_cast<__m512i>(y);
  x = reinterpret_cast<Bytes>(_mm512_permutex2var_epi32(a, order, b));
  y = reinterpret_cast<Bytes>(_mm512_permutex2var_epi32(a, later, b));
}
