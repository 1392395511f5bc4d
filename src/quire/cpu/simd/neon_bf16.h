// The words of NEON's bfloat16 on top of its dot product: two bfloat16 a lane, and tables of 128 bytes.

typedef uint16_t Halves __attribute__((vector_size(4 * kLanes), aligned(1)));

inline Halves load_halves(const void* p) { return reinterpret_cast<Halves>(load_bytes(p)); }
inline Halves broadcast_halves(const void* lane) { return reinterpret_cast<Halves>(broadcast_bytes(lane)); }
/// The first half of the lanes is `first`, the second `second`.
inline U32 halves_of(uint32_t first, uint32_t second) { return vcombine_u32(vdup_n_u32(first), vdup_n_u32(second)); }

/// Whether any bit is set.
inline bool any(Bytes v) { return any(reinterpret_cast<U32>(v)); }

/// Whether any byte of v is at least that of the limit.
inline bool any_at_least(Bytes v, Bytes limit) { return any(reinterpret_cast<Bytes>(vcgeq_u8(v, limit))); }

/// sum + the products of two bfloat16 each. The instruction adds the two products, then the sum, and rounds either to
/// odd: an error of less than twice that of rounding to nearest, in half as many roundings.
inline F32 dot(F32 sum, Halves x, Halves y) {
  return vbfdotq_f32(sum, vreinterpretq_bf16_u16(x), vreinterpretq_bf16_u16(y));
}

/// A table of 128 bytes, and what it holds at each index; the uppermost bit of an index does not count.
struct ByteTable {
  uint8x16x4_t first, second;
};
inline ByteTable load_table(const uint8_t* table) {
  const auto half = [](const uint8_t* p) {
    return uint8x16x4_t{{vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(p + 32), vld1q_u8(p + 48)}};
  };
  return {half(table), half(table + 64)};
}
inline Bytes look_up(const ByteTable& table, Bytes index) {
  // An index of 64 or more finds 0 in the first half, and keeps that in the second.
  const Bytes at = index & 0x7F;
  return vqtbx4q_u8(vqtbl4q_u8(table.first, at), table.second, at - 64);
}
