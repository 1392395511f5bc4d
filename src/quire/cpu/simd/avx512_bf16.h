// The words of AVX-512 BF16 and VBMI on top of AVX-512 VNNI: two bfloat16 a lane, and tables of 128 bytes.

typedef uint16_t Halves __attribute__((vector_size(4 * kLanes), aligned(1)));

inline Halves load_halves(const void* p) { return reinterpret_cast<Halves>(load_bytes(p)); }
inline Halves broadcast_halves(const void* lane) { return reinterpret_cast<Halves>(broadcast_bytes(lane)); }
/// The first half of the lanes is `first`, the second `second`.
inline U32 halves_of(uint32_t first, uint32_t second) {
  return reinterpret_cast<U32>(
      _mm512_mask_set1_epi32(_mm512_set1_epi32(static_cast<int>(first)), 0xFF00, static_cast<int>(second)));
}

/// The larger of two bytes without sign.
inline Bytes larger(Bytes x, Bytes y) {
  return reinterpret_cast<Bytes>(_mm512_max_epu8(reinterpret_cast<__m512i>(x), reinterpret_cast<__m512i>(y)));
}
inline Halves larger(Halves x, Halves y) {
  return reinterpret_cast<Halves>(_mm512_max_epu16(reinterpret_cast<__m512i>(x), reinterpret_cast<__m512i>(y)));
}
/// Whether any bit is set.
inline bool any(Bytes v) { return any(reinterpret_cast<U32>(v)); }

/// Whether any byte of v is at least that of the limit.
inline bool any_at_least(Bytes v, Bytes limit) {
  return _mm512_cmpge_epu8_mask(reinterpret_cast<__m512i>(v), reinterpret_cast<__m512i>(limit)) != 0;
}

/// sum + the products of two bfloat16 each.
inline F32 dot(F32 sum, Halves x, Halves y) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(x), reinterpret_cast<__m512bh>(y));
}

/// A table of 128 bytes, and what it holds at each index; the uppermost bit of an index does not count.
struct ByteTable {
  Bytes first, second;
};
inline ByteTable load_table(const uint8_t* table) { return {load_bytes(table), load_bytes(table + 64)}; }
inline Bytes look_up(const ByteTable& table, Bytes index) {
  return reinterpret_cast<Bytes>(_mm512_permutex2var_epi8(reinterpret_cast<__m512i>(table.first),
                                                          reinterpret_cast<__m512i>(index),
                                                          reinterpret_cast<__m512i>(table.second)));
}
