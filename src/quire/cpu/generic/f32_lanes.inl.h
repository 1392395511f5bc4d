// Lanes of one float32: exact for every format, on every machine.

struct F32Lanes {
  using Vector = F32;
  static constexpr int kPerLane = 1;
  static constexpr int64_t kSlabLanes = kSlab, kRowLanes = kSlab;
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
    decode_codes(o.spec.element, codes_across(o, outer, slab, staged), slab.padded * kGroup, out);
  }
};
