// Lines of bytes as columns of quads: a vector holds four neighbouring bytes of each of kLanes lines.
#pragma once

#include "quire/cpu/generic/elements/codes.inl.h"
#include "quire/cpu/generic/elements/lines.inl.h"
#include "quire/cpu/generic/gemm/panel_codes.inl.h"

/// Vectors that hold one quad of 16 lines.
constexpr int kQuadVectors = kLaneGroup / kLanes;

/// How far ahead memory is asked for: bytes of a line that is transposed, bytes of quads, lines that are packed one
/// after the other.
constexpr int64_t kBytesAhead = 256, kQuadsAhead = 4096, kLinesAhead = 16;

/// Quads of kLanes lines that lie one after the other.
inline U32 load_quads(const uint8_t* quads) {
  return reinterpret_cast<U32>(load(reinterpret_cast<const float*>(quads)));
}

/// Lines that are transposed here.
struct LineQuads {
  static constexpr int kStep = kLanes;  ///< quads that are read at a time
  LineBytes lines;

  /// to[q][v]: bytes [from + 4 q, from + 4 q + 4) of the lines [v * kLanes, (v + 1) * kLanes).
  [[gnu::flatten]] void read(int64_t from, U32 (&to)[kStep][kQuadVectors]) const {
    for (int v = 0; v < kQuadVectors; ++v) {
      F32 rows[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        const uint8_t* line = lines.data + (v * kLanes + i) * lines.stride + from;
        __builtin_prefetch(line + kBytesAhead, 0, 2);
        rows[i] = load(reinterpret_cast<const float*>(line));
      }
      transpose(rows);
      for (int q = 0; q < kStep; ++q) to[q][v] = reinterpret_cast<U32>(rows[q]);
    }
  }
  /// Four bytes of a line.
  const uint8_t* at(int64_t line, int64_t byte) const { return lines.data + line * lines.stride + byte; }
};

/// Lines that are stored so.
struct StoredQuads {
  static constexpr int kStep = 4;
  const uint8_t* bytes;

  void read(int64_t from, U32 (&to)[kStep][kQuadVectors]) const {
    const uint8_t* next = bytes + from * kLaneGroup;
#pragma GCC unroll 8
    for (int i = 0; i < kStep * kQuadVectors; ++i, next += kLanes * kQuadBytes) {
      if (i % kQuadVectors == 0) __builtin_prefetch(next + kQuadsAhead);  // once for a quad of 16 lines
      to[i / kQuadVectors][i % kQuadVectors] = load_quads(next);
    }
  }
  const uint8_t* at(int64_t line, int64_t byte) const { return bytes + byte * kLaneGroup + line * kQuadBytes; }
};

/// Calls body with the codes of 16 lines, a byte each; and with those of 4 bits, two in a byte.
template <class Body>
void with_codes_of(const Operand& o, int64_t outer, const KPanel& panel, const Body& body) {
  StagedCodes staged;
  o.spec.interleaved ? body(StoredQuads{code_quads(o, outer, panel, staged)})
                     : body(LineQuads{codes_along(o, outer, panel, staged)});
}
template <class Body>
void with_pairs_of(const Operand& o, int64_t outer, const KPanel& panel, const Body& body) {
  StagedCodes staged;
  o.spec.interleaved ? body(StoredQuads{packed_quads(o, outer, panel, staged)})
                     : body(LineQuads{packed_along(o, outer, panel, staged)});
}
