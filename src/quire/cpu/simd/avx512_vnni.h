// The words of AVX-512 VNNI on top of AVX-512: four bytes a lane, multiplied and summed in int32.

/// Rows of a micro-tile of bytes, and of any such tile up to which its sums are kept in registers.
constexpr int kInt8Rows = 8, kInt8RegisterRows = 16;

inline Bytes load_bytes(const void* p) { return reinterpret_cast<Bytes>(_mm512_loadu_si512(p)); }
inline void store_bytes(void* p, Bytes v) { _mm512_storeu_si512(p, reinterpret_cast<__m512i>(v)); }
/// A lane repeated.
inline Bytes broadcast_bytes(const void* lane) {
  int32_t x;
  std::memcpy(&x, lane, sizeof x);
  return reinterpret_cast<Bytes>(_mm512_set1_epi32(x));
}
inline I32 broadcast_int(const void* lane) { return reinterpret_cast<I32>(broadcast_bytes(lane)); }

/// Sums of products of bytes, what a row keeps of where they start, and what they come to.
typedef I32 Products;
inline I32 kept_start(I32 start) { return start; }
inline I32 total(Products sum) { return sum; }

/// sum + the products of four bytes each, those of x without sign.
inline I32 dot(I32 sum, Bytes x, Bytes y) {
  return reinterpret_cast<I32>(
      _mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum), reinterpret_cast<__m512i>(x), reinterpret_cast<__m512i>(y)));
}

/// Puts the lanes of x and y in alternation: the first half of them into x, the rest into y.
inline void interleave_lanes(Bytes& x, Bytes& y) {
  const __m512i order = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i later = _mm512_add_epi32(order, _mm512_set1_epi32(8));
  const __m512i a = reinterpret_cast<__m512i>(x), b = reinterpret_cast<__m512i>(y);
  x = reinterpret_cast<Bytes>(_mm512_permutex2var_epi32(a, order, b));
  y = reinterpret_cast<Bytes>(_mm512_permutex2var_epi32(a, later, b));
}
