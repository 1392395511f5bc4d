// Vectors of any length, and words for them that need no instruction of their own.
#pragma once

#include "quire/cpu/generic/vocabulary.inl.h"

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

/// Of every kPart elements of a and b, half of them from kFirst on, in alternation.
template <int kPart, int kFirst, class V, int... I>
inline V interleaved_parts(V a, V b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(
      a, b, (I / kPart * kPart + kFirst + I % kPart / 2 + I % 2 * static_cast<int>(sizeof...(I)))...);
}

/// Elements kFirst, kFirst + 2 ... of a, then of b.
template <int kFirst, class V, int... I>
inline V every_second(V a, V b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, (kFirst + 2 * I)...);
}
