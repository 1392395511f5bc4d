// Lanes of one float32: exact for every format, on every machine.

struct F32Lanes {
  using Vector = F32;
  struct Session {};
  static constexpr int kPerLane = 1;
  static constexpr int64_t kSlabLanes = kSlab, kRowLanes = kSlab;
  static constexpr int kLeastRows = 1;
  static constexpr int kRows = kTileRows, kVectors = kTileVectors;
  static constexpr float kUnit = 1;
  static constexpr bool kFolds = false;
  static constexpr int64_t kMaxBlock = kLongestBlock;

  static F32 load_lanes(const float* p) { return load(p); }
  static F32 broadcast_lane(const float* p) { return broadcast(*p); }
  static F32 accumulate(F32 a, F32 b, F32 sum) { return multiply_add(a, b, sum); }

  template <int Rows, bool Scaled>
  static void multiply(const RegisterTile& tile, const Slab& slab) {
    multiply_lanes<F32Lanes, Rows, Scaled>(tile, slab);
  }

  static void pack_rows(const Operand& o, int64_t outer, const Slab& slab, unsigned /*folded*/, float* out) {
    StagedCodes staged;
    const LineBytes lines = codes_along(o, outer, slab, staged);
    for (int64_t i = 0; i < kGroup; ++i)
      decode_codes(o.spec.element, lines.data + i * lines.stride, slab.padded, out + i * kRowLanes);
  }

  static void pack_columns(const Operand& o, int64_t outer, const Slab& slab, unsigned /*folded*/, float* out) {
    StagedCodes staged;
    const LineBytes lines = codes_along(o, outer, slab, staged);
    if (o.spec.element == Format::e4m3) return turn_and_decode<Format::e4m3>(lines, slab.padded, out);
    if (o.spec.element == Format::e5m2) return turn_and_decode<Format::e5m2>(lines, slab.padded, out);
    turn_and_decode<Format::e2m1>(lines, slab.padded, out);
  }

 private:
  template <Format F>
  static void turn_and_decode(const LineBytes& lines, int64_t count, float* out) {
    for (int64_t l = 0; l < count; l += 4 * kQuads) {
      U32 quads[kQuads][kQuadVectors];
      turn_quads(lines, l, quads);
      for (int q = 0; q < kQuads; ++q)
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c, out += kGroup)
          for (int v = 0; v < kQuadVectors; ++v)
            store(out + v * kLanes, decode_lanes<F>(quads[q][v] >> (8 * c) & 0xFF));
    }
  }
};
