// The words of AVX-VNNI on top of AVX2: four bytes a lane, multiplied and summed in int32.

/// Rows of a micro-tile of bytes.
constexpr int kInt8Rows = 4;

typedef uint8_t Bytes __attribute__((vector_size(4 * kLanes), aligned(1)));

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
inline I32 broadcast_int(const void* lane) { return reinterpret_cast<I32>(broadcast_bytes(lane)); }

/// A table of 16 bytes, and what it holds at each index (below 16).
inline Bytes repeat_table(const uint8_t* table) {
  return reinterpret_cast<Bytes>(_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table))));
}
inline Bytes look_up(Bytes table, Bytes index) {
  return reinterpret_cast<Bytes>(
      _mm256_shuffle_epi8(reinterpret_cast<__m256i>(table), reinterpret_cast<__m256i>(index)));
}

/// sum + the products of four bytes each, those of x without sign. The builtin, because AVX-512 VNNI has the
/// instruction too, under another name: so machines with that can test this file.
inline I32 dot(I32 sum, Bytes x, Bytes y) {
  typedef int V8 __attribute__((vector_size(4 * kLanes)));
  return reinterpret_cast<I32>(
      __builtin_ia32_vpdpbusd_v8si(reinterpret_cast<V8>(sum), reinterpret_cast<V8>(x), reinterpret_cast<V8>(y)));
}

/// Puts the lanes of x and y in alternation: the first half of them into x, the rest into y.
inline void interleave_lanes(Bytes& x, Bytes& y) {
  const __m256i a = reinterpret_cast<__m256i>(x), b = reinterpret_cast<__m256i>(y);
  const __m256i low = _mm256_unpacklo_epi32(a, b), high = _mm256_unpackhi_epi32(a, b);
  x = reinterpret_cast<Bytes>(_mm256_permute2x128_si256(low, high, 0x20));
  y = reinterpret_cast<Bytes>(_mm256_permute2x128_si256(low, high, 0x31));
}
