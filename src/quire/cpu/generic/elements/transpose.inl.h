// Bytes transposed between rows and columns.
#pragma once

#include "quire/cpu/generic/elements/codes.inl.h"
#include "quire/cpu/generic/elements/encode.inl.h"
#include "quire/cpu/generic/elements/lines.inl.h"
#include "quire/cpu/generic/elements/vectors.inl.h"

/// The first 8 bytes of every 16 of a and b, alternating; with kHigh the last 8.
template <bool kHigh, class V, int... I>
inline V interleave_bytes(V a, V b, std::integer_sequence<int, I...>) {
  constexpr int first = kHigh ? kLaneGroup / 2 : 0, size = sizeof(V);
  return __builtin_shufflevector(a, b, (I / kLaneGroup * kLaneGroup + first + I % kLaneGroup / 2 + I % 2 * size)...);
}

/// Every second group of 16 bytes of a, then of b: those at even places; with kOdd the others.
template <bool kOdd, class V, int... I>
inline V alternate_groups(V a, V b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, ((I / kLaneGroup * 2 + kOdd) * kLaneGroup + I % kLaneGroup)...);
}

/// Transposes the groups of 16 x 16 bytes of 16 rows of N bytes: row i of the result has row i of every transposed
/// group. Interleaving the halves of the rows rotates the 8 bits of an element's address by one, so that four rounds
/// exchange row and column.
template <int64_t N>
inline void transpose_groups(const uint8_t* in, int64_t in_stride, uint8_t* out, int64_t out_stride) {
  typedef Vec<uint8_t, N> V;
  constexpr auto bytes = std::make_integer_sequence<int, N>();
  V x[kLaneGroup], y[kLaneGroup];
#pragma GCC unroll 16
  for (int i = 0; i < kLaneGroup; ++i) x[i] = *reinterpret_cast<const V*>(in + i * in_stride);
#pragma GCC unroll 4
  for (int round = 0; round < 4; ++round) {
#pragma GCC unroll 8
    for (int i = 0; i < kLaneGroup / 2; ++i) {
      y[2 * i] = interleave_bytes<false>(x[i], x[i + kLaneGroup / 2], bytes);
      y[2 * i + 1] = interleave_bytes<true>(x[i], x[i + kLaneGroup / 2], bytes);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLaneGroup; ++i) x[i] = y[i];
  }
#pragma GCC unroll 16
  for (int i = 0; i < kLaneGroup; ++i) *reinterpret_cast<V*>(out + i * out_stride) = x[i];
}

/// Transposes 16 x 16 bytes.
inline void transpose_codes(const uint8_t* in, int64_t in_stride, uint8_t* out, int64_t out_stride) {
  transpose_groups<kLaneGroup>(in, in_stride, out, out_stride);
}

/// Transposes as many rows as a vector has bytes, of so many bytes. The groups of 16 x 16 are transposed first, then
/// the groups themselves.
inline void transpose_square(const uint8_t* in, int64_t in_stride, uint8_t* out, int64_t out_stride) {
  typedef Vec<uint8_t, kQuad> V;
  constexpr auto bytes = std::make_integer_sequence<int, kQuad>();
  constexpr int groups = kQuad / kLaneGroup;
  if constexpr (groups == 1) return transpose_codes(in, in_stride, out, out_stride);
  alignas(64) uint8_t rows[groups][kLaneGroup][kQuad];
  for (int g = 0; g < groups; ++g)
    transpose_groups<kQuad>(in + g * kLaneGroup * in_stride, in_stride, rows[g][0], kQuad);
#pragma GCC unroll 2
  for (int i = 0; i < kLaneGroup; ++i) {
    V x[groups], y[groups];
#pragma GCC unroll 4
    for (int g = 0; g < groups; ++g) x[g] = *reinterpret_cast<const V*>(rows[g][i]);
#pragma GCC unroll 2
    for (int round = 1; round < groups; round *= 2) {
#pragma GCC unroll 2
      for (int g = 0; g < groups / 2; ++g) {
        y[g] = alternate_groups<false>(x[2 * g], x[2 * g + 1], bytes);
        y[g + groups / 2] = alternate_groups<true>(x[2 * g], x[2 * g + 1], bytes);
      }
#pragma GCC unroll 4
      for (int g = 0; g < groups; ++g) x[g] = y[g];
    }
#pragma GCC unroll 4
    for (int g = 0; g < groups; ++g) *reinterpret_cast<V*>(out + (kLaneGroup * g + i) * out_stride) = x[g];
  }
}

/// Transposes whole squares of kQuad x kQuad bytes that cover rows x cols.
inline void transpose_tile(const uint8_t (&in)[kTile][kTile], int64_t rows, int64_t cols,
                           uint8_t (&out)[kTile][kTile]) {
  for (int64_t i = 0; i < rows; i += kQuad)
    for (int64_t j = 0; j < cols; j += kQuad) transpose_square(&in[i][j], kTile, &out[j][i], kTile);
}
