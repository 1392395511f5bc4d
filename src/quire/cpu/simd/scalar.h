// The vocabulary of plain C++ for any machine: 4 lanes in the compiler's vector type, no instruction named.
// Every file of this folder defines the same words in the namespace that includes it.

constexpr int kLanes = 4;
/// Shape of the product's micro-tile: kTileRows rows by kTileVectors vectors (a multiple of 16 columns).
constexpr int kTileRows = 2;
constexpr int kTileVectors = 4;
/// Vectors that a loop can keep.
constexpr int kRegisters = 16;

// Codes are loaded too, from any address.
typedef float F32 __attribute__((vector_size(4 * kLanes), aligned(1)));
typedef int32_t I32 __attribute__((vector_size(4 * kLanes), aligned(1)));
typedef uint32_t U32 __attribute__((vector_size(4 * kLanes), aligned(1)));

inline F32 load(const float* p) { return *reinterpret_cast<const F32*>(p); }
inline void store(float* p, F32 v) { *reinterpret_cast<F32*>(p) = v; }
inline F32 broadcast(float x) { return F32{x, x, x, x}; }
/// a * b + c; rounded once where the machine can, twice here. Only sums whose order is free and sums
/// with an exact product may use it.
inline F32 multiply_add(F32 a, F32 b, F32 c) { return a * b + c; }

/// Whether multiply_add() takes no longer where a factor is subnormal.
inline bool has_quick_subnormals() { return false; }

/// Whether any bit is set.
inline bool any(U32 v) { return (v[0] | v[1] | v[2] | v[3]) != 0; }

/// kLanes bytes, widened.
inline U32 load_u8(const uint8_t* p) { return U32{p[0], p[1], p[2], p[3]}; }

/// float16: exact widening; narrowing rounds to nearest even and keeps NaN quiet, as format/half.h.
inline F32 load_f16(const uint16_t* p) {
  return F32{f16_to_f32(p[0]), f16_to_f32(p[1]), f16_to_f32(p[2]), f16_to_f32(p[3])};
}
inline void store_f16(uint16_t* p, F32 v) {
  for (int i = 0; i < kLanes; ++i) p[i] = f32_to_f16(v[i]);
}

typedef int16_t I16x8 __attribute__((vector_size(16), aligned(2)));
typedef int32_t I32x4 __attribute__((vector_size(16), aligned(4)));
typedef uint16_t U16 __attribute__((vector_size(4 * kLanes), aligned(1)));
typedef uint64_t U64 __attribute__((vector_size(4 * kLanes), aligned(4)));

/// Largest lane, none of them negative.
inline int16_t largest_lane(I16x8 v) {
  int16_t largest = 0;
  for (int i = 0; i < 8; ++i) largest = v[i] > largest ? v[i] : largest;
  return largest;
}
inline int32_t largest_lane(I32x4 v) {
  int32_t largest = 0;
  for (int i = 0; i < 4; ++i) largest = v[i] > largest ? v[i] : largest;
  return largest;
}

/// The magnitude of x, or `limit` if that is smaller; anything up to the limit if x is NaN.
inline F32 limited_magnitude(F32 x, float limit) {
  const U32 bits = reinterpret_cast<U32>(x) & 0x7FFFFFFFu;
  const F32 magnitude = reinterpret_cast<F32>(bits);
  return magnitude < limit ? magnitude : broadcast(limit);
}

/// x, or the limit if x is below it, or above; NaN stays NaN.
inline F32 at_least(F32 x, float limit) { return x < limit ? broadcast(limit) : x; }
inline F32 at_most(F32 x, float limit) { return x > limit ? broadcast(limit) : x; }

/// Products of the low 32 bits of each lane.
inline U64 multiply_low(U64 a, U64 b) { return (a & 0xFFFFFFFFu) * (b & 0xFFFFFFFFu); }

/// Writes 64 aligned bytes past the caches, where the machine can; finish_streams() before others read them.
inline void stream_64(uint8_t* to, const uint8_t* from) { std::memcpy(to, from, 64); }
inline void finish_streams() {}

/// 2 kLanes bytes, widened.
inline U16 load_u8_words(const uint8_t* p) { return U16{p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7]}; }

/// kLanes words, widened; and the low halves of lanes that are below 65536.
inline U32 load_u16(const uint16_t* p) { return U32{p[0], p[1], p[2], p[3]}; }
inline void store_u16(uint16_t* p, U32 v) {
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<uint16_t>(v[i]);
}

/// The upper halves of the lanes of two vectors.
inline void store_upper(uint16_t* p, U32 first, U32 second) {
  store_u16(p, first >> 16);
  store_u16(p + kLanes, second >> 16);
}

/// Bits of a where those of the mask are set, of b elsewhere.
inline U32 blend_bits(uint32_t mask, U32 a, U32 b) { return (a & mask) | (b & ~mask); }

/// 4 kLanes bfloat16, widened.
inline void load_bf16(const uint16_t* p, F32 (&v)[4]) {
  for (int q = 0; q < 4; ++q) v[q] = reinterpret_cast<F32>(load_u16(p + q * kLanes) << 16);
}

/// kLanes float16: bytes with their sign extended, moved up by kShift, and of that the bits that are set in kKept.
template <int kShift, uint16_t kKept>
inline F32 load_bytes_as_f16(const uint8_t* p) {
  F32 v;
  for (int i = 0; i < kLanes; ++i)
    v[i] = f16_to_f32(static_cast<uint16_t>(static_cast<int8_t>(p[i]) << kShift & kKept));
  return v;
}

typedef uint8_t Bytes __attribute__((vector_size(4 * kLanes), aligned(1)));

/// A table of 16 bytes, and what it holds at each index (below 16).
inline Bytes repeat_table(const uint8_t* table) {
  Bytes bytes;
  std::memcpy(&bytes, table, sizeof bytes);
  return bytes;
}
inline Bytes look_up(Bytes table, Bytes index) { return __builtin_shuffle(table, index); }
#include "quire/cpu/simd/byte_pairs.h"

/// The smaller of two bytes without sign.
inline Bytes smaller(Bytes x, Bytes y) { return x < y ? x : y; }
/// The smaller of two words without sign.
inline U16 smaller(U16 x, U16 y) { return x < y ? x : y; }
/// x - y, or 0 where y is larger.
inline U16 excess(U16 x, U16 y) { return x > y ? x - y : U16{}; }
inline Bytes excess(Bytes x, Bytes y) { return x > y ? x - y : Bytes{}; }

/// Words below 2^15 as bytes, 255 if they are above it, and bytes with the sign of words; in an order of their own.
inline Bytes low_bytes(U16 first, U16 second) {
  Bytes bytes;
  for (int i = 0; i < 2 * kLanes; ++i) {
    bytes[i] = static_cast<uint8_t>(std::min<uint16_t>(first[i], 255));
    bytes[i + 2 * kLanes] = static_cast<uint8_t>(std::min<uint16_t>(second[i], 255));
  }
  return bytes;
}
inline Bytes upper_bytes(U16 first, U16 second) { return low_bytes(first >> 8, second >> 8); }
/// Stores bytes of two vectors in the order of the words.
inline void store_bytes_of_words(uint8_t* p, Bytes v) { *reinterpret_cast<Bytes*>(p) = v; }

/// Lanes below 256 as bytes, and bytes with the sign of lanes; in an order of their own.
inline Bytes low_bytes(const U32 (&v)[4]) {
  Bytes bytes;
  for (int i = 0; i < 4 * kLanes; ++i) bytes[i] = static_cast<uint8_t>(v[i / kLanes][i % kLanes]);
  return bytes;
}
inline Bytes upper_bytes(const U32 (&v)[4]) {
  const U32 upper[4] = {v[0] >> 24, v[1] >> 24, v[2] >> 24, v[3] >> 24};
  return low_bytes(upper);
}
/// Stores bytes of four vectors in the order of the lanes.
inline void store_bytes_of_lanes(uint8_t* p, Bytes v) { *reinterpret_cast<Bytes*>(p) = v; }

/// The low bytes of four vectors, which are below 256, in order.
inline void store_u8(uint8_t* p, const U32 (&v)[4]) { store_bytes_of_lanes(p, low_bytes(v)); }

/// The low halves of the lanes of two vectors, in alternation.
inline U16 low_halves(U32 even, U32 odd) { return reinterpret_cast<U16>((even & 0xFFFFu) | odd << 16); }

/// Neighbouring words below 16 as a byte in each lane, the first one in its low bits.
inline U32 join_nibbles(U16 nibbles) {
  const U32 pairs = reinterpret_cast<U32>(nibbles);
  return (pairs | pairs >> 12) & 0xFFu;
}
