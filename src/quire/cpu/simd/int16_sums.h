// Products of bytes without VNNI: summed in int16, two sums a lane. Bytes of 4-bit codes are small: a block of 16 comes
// to 2304 at most in each sum, and as much again where it starts.

/// Sums of products of bytes, and what a row keeps of where they start.
typedef int16_t Products __attribute__((vector_size(4 * kLanes), aligned(1)));
inline I32 kept_start(I32 start) { return start & 0xFFFF; }  // in the first of the two sums

/// sum + the products of four bytes each, those of x without sign.
inline Products dot(Products sum, Bytes x, Bytes y) { return sum + reinterpret_cast<Products>(multiply_pairs(x, y)); }
