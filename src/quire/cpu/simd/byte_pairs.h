// What plain C++ and NEON, which has no instruction for it, share.

/// The sums of the products of neighbours, x without sign and y with one.
inline U16 multiply_pairs(Bytes x, Bytes y) {
  typedef int16_t Words __attribute__((vector_size(4 * kLanes)));
  const Words pairs = reinterpret_cast<Words>(y), even = pairs << 8 >> 8, odd = pairs >> 8;
  const U16 factors = reinterpret_cast<U16>(x);
  return reinterpret_cast<U16>(reinterpret_cast<Words>(factors & 0xFF) * even +
                               reinterpret_cast<Words>(factors >> 8) * odd);
}
