// Turns lines of bytes into columns of quads: a vector holds four neighbouring bytes of each of kLanes lines.

/// Quads that are turned at a time, and vectors that hold one quad of 16 lines.
constexpr int kQuads = kLanes;
constexpr int kQuadVectors = kGroup / kLanes;

/// How far ahead memory is asked for: bytes of a line that is turned, lines that are packed one after the other.
constexpr int64_t kBytesAhead = 256, kLinesAhead = 16;

/// quads[q][v]: bytes [from + 4 q, from + 4 q + 4) of the lines [v * kLanes, (v + 1) * kLanes).
[[gnu::flatten]] inline void turn_quads(const LineBytes& lines, int64_t from, U32 (&quads)[kQuads][kQuadVectors]) {
  for (int v = 0; v < kQuadVectors; ++v) {
    F32 rows[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      const uint8_t* line = lines.data + (v * kLanes + i) * lines.stride + from;
      __builtin_prefetch(line + kBytesAhead, 0, 2);
      rows[i] = load(reinterpret_cast<const float*>(line));
    }
    transpose(rows);
    for (int q = 0; q < kQuads; ++q) quads[q][v] = reinterpret_cast<U32>(rows[q]);
  }
}
