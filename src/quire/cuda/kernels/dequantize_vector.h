// How the warps of dequantize_vector.cu share codes, which the host counts.
#pragma once

#include <cstdint>

namespace quire::cuda {

/// Codes of a line that a warp decodes at a time, where lines run along memory.
inline constexpr int64_t kSegmentCodes = 1024;

/// Where lines run against memory, a warp decodes a square: as many codes of as many lines.
inline constexpr int64_t kAcross = 32;
/// Squares that follow each other along lines, and are taken before those of other lines.
inline constexpr int64_t kAcrossInTurn = 4;

}  // namespace quire::cuda
