// Index maps of scale matrices.
#pragma once

#include <cstdint>

namespace quire {

inline constexpr int64_t kSwizzleRows = 128;
inline constexpr int64_t kSwizzleCols = 4;

/// Offset of scale (outer i, block j) in the padded 128x4 tiled layout; `blocks` = number of j (numerics.md 4.5).
constexpr int64_t swizzled_offset(int64_t i, int64_t j, int64_t blocks) {
  const int64_t tiles = (blocks + kSwizzleCols - 1) / kSwizzleCols;
  return ((i / 128) * tiles + j / 4) * 512 + (i % 32) * 16 + (i % 128) / 32 * 4 + j % 4;
}

}  // namespace quire
