// Two 4-bit codes per byte, and nothing else: the even element in the low nibble (numerics.md 1.2).
#pragma once

#include <cstdint>

namespace quire {

constexpr uint8_t pack(unsigned even, unsigned odd) { return static_cast<uint8_t>((even & 0xFu) | (odd << 4)); }

/// The code of element i of a packed line.
constexpr unsigned unpack(const uint8_t* line, int64_t i) { return line[i / 2] >> (i % 2 * 4) & 0xFu; }

}  // namespace quire
