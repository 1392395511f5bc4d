// The vocabulary of NEON, which every 64-bit ARM CPU has: 4 lanes.

constexpr int kLanes = 4;
constexpr int kTileRows = 6;
constexpr int kTileVectors = 4;
constexpr int kRegisters = 32;

// Codes are loaded too, from any address.
typedef float F32 __attribute__((vector_size(4 * kLanes), aligned(1)));
typedef int32_t I32 __attribute__((vector_size(4 * kLanes), aligned(1)));
typedef uint32_t U32 __attribute__((vector_size(4 * kLanes), aligned(1)));
typedef int16_t I16x8 __attribute__((vector_size(16), aligned(2)));
typedef int32_t I32x4 __attribute__((vector_size(16), aligned(4)));
typedef uint16_t U16 __attribute__((vector_size(4 * kLanes), aligned(1)));
typedef uint64_t U64 __attribute__((vector_size(4 * kLanes), aligned(4)));

inline F32 load(const float* p) { return *reinterpret_cast<const F32*>(p); }
inline void store(float* p, F32 v) { *reinterpret_cast<F32*>(p) = v; }
inline F32 broadcast(float x) { return vdupq_n_f32(x); }
inline F32 multiply_add(F32 a, F32 b, F32 c) { return vfmaq_f32(c, a, b); }

/// Whether multiply_add() takes no longer where a factor is subnormal.
inline bool has_quick_subnormals() { return true; }

/// Whether any bit is set.
inline bool any(U32 v) { return vmaxvq_u32(v) != 0; }

/// kLanes words, widened; and the low halves of lanes that are below 65536.
inline U32 load_u16(const uint16_t* p) { return vmovl_u16(vld1_u16(p)); }
inline void store_u16(uint16_t* p, U32 v) { vst1_u16(p, vmovn_u32(v)); }

/// kLanes bytes, in the low half of what a register of 8 bytes holds.
inline uint8x8_t load_four_bytes(const uint8_t* p) {
  uint32_t bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return vreinterpret_u8_u32(vdup_n_u32(bytes));
}

/// kLanes bytes, widened.
inline U32 load_u8(const uint8_t* p) { return vmovl_u16(vget_low_u16(vmovl_u8(load_four_bytes(p)))); }

/// 2 kLanes bytes, widened.
inline U16 load_u8_words(const uint8_t* p) { return vmovl_u8(vld1_u8(p)); }

/// float16: exact widening; narrowing rounds to nearest even and keeps NaN quiet, as format/half.h.
inline F32 load_f16(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
inline void store_f16(uint16_t* p, F32 v) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(v))); }

/// Largest lane.
inline int16_t largest_lane(I16x8 v) { return vmaxvq_s16(v); }
inline int32_t largest_lane(I32x4 v) { return vmaxvq_s32(v); }

/// The magnitude of x, or `limit` if that is smaller, or if x is NaN: as integers, whose smaller one a NaN is not.
inline F32 limited_magnitude(F32 x, float limit) {
  const uint32x4_t magnitude = vreinterpretq_u32_f32(vabsq_f32(x));
  return vreinterpretq_f32_u32(vminq_u32(magnitude, vdupq_n_u32(std::bit_cast<uint32_t>(limit))));
}

/// Products of the low 32 bits of each lane.
inline U64 multiply_low(U64 a, U64 b) { return vmull_u32(vmovn_u64(a), vmovn_u64(b)); }

/// Writes 64 aligned bytes. Not past the caches: no intrinsic says so, and CPUs see by themselves that whole lines are
/// written.
inline void stream_64(uint8_t* to, const uint8_t* from) { std::memcpy(to, from, 64); }
inline void finish_streams() {}

/// The upper halves of the lanes of two vectors.
inline void store_upper(uint16_t* p, U32 first, U32 second) {
  vst1q_u16(p, vuzp2q_u16(vreinterpretq_u16_u32(first), vreinterpretq_u16_u32(second)));
}

/// Bits of a where those of the mask are set, of b elsewhere.
inline U32 blend_bits(uint32_t mask, U32 a, U32 b) { return vbslq_u32(vdupq_n_u32(mask), a, b); }

/// 4 kLanes bfloat16, widened.
inline void load_bf16(const uint16_t* p, F32 (&v)[4]) {
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h) {
    const uint16x8_t words = vld1q_u16(p + h * 2 * kLanes);
    v[2 * h] = vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(words), 16));
    v[2 * h + 1] = vreinterpretq_f32_u32(vshll_high_n_u16(words, 16));
  }
}

/// kLanes float16: bytes with their sign extended, moved up by kShift, and of that the bits that are set in kKept.
template <int kShift, uint16_t kKept>
inline F32 load_bytes_as_f16(const uint8_t* p) {
  const int16x8_t words = vshll_n_s8(vreinterpret_s8_u8(load_four_bytes(p)), kShift);
  const uint16x4_t kept = vand_u16(vreinterpret_u16_s16(vget_low_s16(words)), vdup_n_u16(kKept));
  return vcvt_f32_f16(vreinterpret_f16_u16(kept));
}

typedef uint8_t Bytes __attribute__((vector_size(4 * kLanes), aligned(1)));

/// A table of 16 bytes, and what it holds at each index (below 16).
inline Bytes repeat_table(const uint8_t* table) { return vld1q_u8(table); }
inline Bytes look_up(Bytes table, Bytes index) { return vqtbl1q_u8(table, index); }
#include "quire/cpu/simd/byte_pairs.h"

/// The smaller of two bytes without sign.
inline Bytes smaller(Bytes x, Bytes y) { return vminq_u8(x, y); }
/// The smaller of two words without sign.
inline U16 smaller(U16 x, U16 y) { return vminq_u16(x, y); }
/// x - y, or 0 where y is larger.
inline U16 excess(U16 x, U16 y) { return vqsubq_u16(x, y); }
inline Bytes excess(Bytes x, Bytes y) { return vqsubq_u8(x, y); }

/// Words below 2^15 as bytes, 255 if they are above it, and bytes with the sign of words; in an order of their own.
inline Bytes low_bytes(U16 first, U16 second) { return vqmovn_high_u16(vqmovn_u16(first), second); }
inline Bytes upper_bytes(U16 first, U16 second) {
  return vuzp2q_u8(vreinterpretq_u8_u16(first), vreinterpretq_u8_u16(second));
}
/// Stores bytes of two vectors in the order of the words.
inline void store_bytes_of_words(uint8_t* p, Bytes v) { vst1q_u8(p, v); }

/// Lanes below 256 as bytes, and bytes with the sign of lanes; in an order of their own.
inline Bytes low_bytes(const U32 (&v)[4]) {
  const auto words = [&](int q) { return vreinterpretq_u16_u32(v[q]); };
  const uint16x8_t low = vuzp1q_u16(words(0), words(1)), high = vuzp1q_u16(words(2), words(3));
  return vuzp1q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high));
}
inline Bytes upper_bytes(const U32 (&v)[4]) {
  const auto words = [&](int q) { return vreinterpretq_u16_u32(v[q]); };
  return upper_bytes(vuzp2q_u16(words(0), words(1)), vuzp2q_u16(words(2), words(3)));
}
/// Stores bytes of four vectors in the order of the lanes.
inline void store_bytes_of_lanes(uint8_t* p, Bytes v) { vst1q_u8(p, v); }

/// The low bytes of four vectors, which are below 256, in order.
inline void store_u8(uint8_t* p, const U32 (&v)[4]) { store_bytes_of_lanes(p, low_bytes(v)); }

/// The low halves of the lanes of two vectors, in alternation.
inline U16 low_halves(U32 even, U32 odd) { return vtrn1q_u16(vreinterpretq_u16_u32(even), vreinterpretq_u16_u32(odd)); }

/// Neighbouring words below 16 as a byte in each lane, the first one in its low bits.
inline U32 join_nibbles(U16 nibbles) {
  const U32 pairs = vreinterpretq_u32_u16(nibbles);
  return (pairs | pairs >> 12) & 0xFFu;
}
