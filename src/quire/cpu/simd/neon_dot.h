// The words of NEON's dot product on top of NEON: four bytes a lane, multiplied and summed in int32.

/// Rows of a micro-tile of bytes, and of those up to which its sums are kept in registers: columns of a block take half
/// of the registers.
constexpr int kInt8Rows = 4, kInt8RegisterRows = 2;

inline Bytes load_bytes(const void* p) { return vld1q_u8(static_cast<const uint8_t*>(p)); }
inline void store_bytes(void* p, Bytes v) { vst1q_u8(static_cast<uint8_t*>(p), v); }
/// A lane repeated.
inline I32 broadcast_int(const void* lane) {
  int32_t x;
  std::memcpy(&x, lane, sizeof x);
  return vdupq_n_s32(x);
}
inline Bytes broadcast_bytes(const void* lane) { return reinterpret_cast<Bytes>(broadcast_int(lane)); }

/// Sums of products of bytes, what a row keeps of where they start, and what they come to.
typedef I32 Products;
inline I32 kept_start(I32 start) { return start; }
inline I32 total(Products sum) { return sum; }

/// sum + the products of four bytes each, those of x without sign and below 128: the instruction takes both with one.
inline I32 dot(I32 sum, Bytes x, Bytes y) { return vdotq_s32(sum, vreinterpretq_s8_u8(x), vreinterpretq_s8_u8(y)); }

/// Puts the lanes of x and y in alternation: the first half of them into x, the rest into y.
inline void interleave_lanes(Bytes& x, Bytes& y) {
  const uint32x4_t a = vreinterpretq_u32_u8(x), b = vreinterpretq_u32_u8(y);
  x = vreinterpretq_u8_u32(vzip1q_u32(a, b));
  y = vreinterpretq_u8_u32(vzip2q_u32(a, b));
}
