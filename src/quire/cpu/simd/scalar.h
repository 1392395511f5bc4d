// The vocabulary of plain C++ for any machine: 4 lanes in the compiler's vector type, no instruction named.
// Every file of this folder defines the same words in the namespace that includes it.

constexpr int kLanes = 4;
/// Shape of the product's register tile: kTileRows rows by kTileVectors vectors (a multiple of 16 columns).
constexpr int kTileRows = 2;
constexpr int kTileVectors = 4;

typedef float F32 __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef int32_t I32 __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef uint32_t U32 __attribute__((vector_size(4 * kLanes), aligned(4)));

inline F32 load(const float* p) { return *reinterpret_cast<const F32*>(p); }
inline void store(float* p, F32 v) { *reinterpret_cast<F32*>(p) = v; }
inline F32 broadcast(float x) { return F32{x, x, x, x}; }
/// a * b + c; rounded once where the machine can, twice here. Only sums whose order is free may use it.
inline F32 multiply_add(F32 a, F32 b, F32 c) { return a * b + c; }

/// kLanes bytes, widened.
inline U32 load_u8(const uint8_t* p) { return U32{p[0], p[1], p[2], p[3]}; }

/// float16: exact widening; narrowing rounds to nearest even and keeps NaN quiet, as format/half.h.
inline F32 load_f16(const uint16_t* p) {
  return F32{f16_to_f32(p[0]), f16_to_f32(p[1]), f16_to_f32(p[2]), f16_to_f32(p[3])};
}
inline void store_f16(uint16_t* p, F32 v) {
  for (int i = 0; i < kLanes; ++i) p[i] = f32_to_f16(v[i]);
}
