// Vectors of any length, and words for them that need no instruction of their own.
#pragma once

/// A vector of N elements.
template <class T, int64_t N>
struct VectorOf {
  typedef T Type __attribute__((vector_size(N * static_cast<int64_t>(sizeof(T))), aligned(sizeof(T))));
};
template <class T, int64_t N>
using Vec = typename VectorOf<T, N>::Type;

template <class V>
inline V larger(V a, V b) {
  return a > b ? a : b;
}
