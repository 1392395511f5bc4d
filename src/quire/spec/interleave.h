// Index map of interleaved bytes: codes, and scales of a byte each, in the order in which products read columns.
#pragma once

#include <cstdint>

#include "quire/base/shape.h"

namespace quire {

inline constexpr int64_t kInterleavedLines = 16;
inline constexpr int64_t kInterleavedBytes = 4;

/// Offset of a byte of a line, in a matrix of lines that hold `bytes` each: [line / 16][byte / 4][line % 16][byte % 4],
/// padded to whole tiles (numerics.md 2.4).
constexpr int64_t interleaved_offset(int64_t line, int64_t byte, int64_t bytes) {
  const int64_t length = padded(bytes, kInterleavedBytes);
  return line / kInterleavedLines * (kInterleavedLines * length) + byte / kInterleavedBytes * 64 +
         line % kInterleavedLines * kInterleavedBytes + byte % kInterleavedBytes;
}

}  // namespace quire
