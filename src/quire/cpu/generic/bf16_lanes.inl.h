// Lanes of two bfloat16: every 8-bit and 4-bit code is one exactly, so products are exact and sums are float32.
//
// A vector of codes becomes two of bfloat16 by tables: one holds codes 0 and 2 of each quad, the other 1 and 3. Rows
// and columns agree on that order, and that is all a sum of products needs.

/// Scales are folded by subtraction that stops at 0, so that 0 stays 0: magnitudes are raised by this exponent first.
constexpr int kRaised = 64;

/// The two bytes of the bfloat16 of every code without its uppermost bit, as it is and raised.
struct Bf16Bytes {
  alignas(64) std::array<uint8_t, 128> low{}, high{}, raised_low{}, raised_high{};
};
constexpr Bf16Bytes bf16_bytes(Format f) {
  Bf16Bytes t;
  for (size_t i = 0; i < 128; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(quire::decode(f, static_cast<int>(i) % row(f).codes())) >> 16;
    const uint32_t raised = bits == 0 ? 0 : bits + (kRaised << 7);
    t.low[i] = static_cast<uint8_t>(bits), t.high[i] = static_cast<uint8_t>(bits >> 8);
    t.raised_low[i] = static_cast<uint8_t>(raised), t.raised_high[i] = static_cast<uint8_t>(raised >> 8);
  }
  return t;
}
constexpr Bf16Bytes kE4m3Bf16 = bf16_bytes(Format::e4m3), kE5m2Bf16 = bf16_bytes(Format::e5m2),
                    kE2m1Bf16 = bf16_bytes(Format::e2m1);

/// Codes to bfloat16. even: codes 0 and 2 of each quad; odd: 1 and 3.
class Bf16Decoder {
 public:
  Bf16Decoder(Format f, bool folds) {
    const Bf16Bytes& t = f == Format::e4m3 ? kE4m3Bf16 : f == Format::e5m2 ? kE5m2Bf16 : kE2m1Bf16;
    low_ = load_table((folds ? t.raised_low : t.low).data()),
    high_ = load_table((folds ? t.raised_high : t.high).data());
    first_special_ = Bytes{} + static_cast<uint8_t>(2 * (row(f).max_code() + 1));
  }

  void decode(Bytes codes, Halves& even, Halves& odd) const {
    magnitudes(codes, even, odd);
    const Halves signs = reinterpret_cast<Halves>(codes);
    even |= (signs << 8) & 0x8000;
    odd |= signs & 0x8000;
  }

  /// The same with exponents reduced by `less` >> 7 from where the tables have them. Not for infinities and NaN.
  void fold(Bytes codes, Halves less, Halves& even, Halves& odd) const {
    magnitudes(codes, even, odd);
    const Halves signs = reinterpret_cast<Halves>(codes);
    even = subtract_to_zero(even, less) | ((signs << 8) & 0x8000);
    odd = subtract_to_zero(odd, less) | (signs & 0x8000);
  }

  /// All bits where a code is an infinity or NaN.
  Bytes special(Bytes codes) const { return reinterpret_cast<Bytes>((codes + codes) >= first_special_); }

 private:
  void magnitudes(Bytes codes, Halves& even, Halves& odd) const {
    const Halves l = reinterpret_cast<Halves>(look_up(low_, codes)),
                 h = reinterpret_cast<Halves>(look_up(high_, codes));
    even = (l & 0x00FF) | (h << 8);
    odd = (l >> 8) | (h & 0xFF00);
  }

  ByteTable low_, high_;
  Bytes first_special_;
};

struct Bf16Lanes {
  using Vector = Halves;
  struct Session {};
  static constexpr int kPerLane = 2;
  static constexpr int64_t kSlabLanes = kSlab / kPerLane, kRowLanes = kSlabLanes;
  static constexpr int kLeastRows = 1;
  static constexpr int kRows = kTileRows, kVectors = kTileVectors;
  static constexpr int64_t kMaxBlock = kLongestBlock;
  static constexpr float kUnit = 1;
  static constexpr bool kFolds = true;

  static Halves load_lanes(const float* p) { return load_halves(p); }
  static Halves broadcast_lane(const float* p) { return broadcast_halves(p); }
  static F32 accumulate(Halves a, Halves b, F32 sum) { return dot(sum, a, b); }

  template <int Rows, bool Scaled>
  static void multiply(const RegisterTile& tile, const Slab& slab) {
    multiply_lanes<Bf16Lanes, Rows, Scaled>(tile, slab);
  }

  static void pack_rows(const Operand& o, int64_t outer, const Slab& slab, unsigned folded, float* out) {
    StagedCodes staged;
    const LineBytes lines = codes_along(o, outer, slab, staged);
    const Bf16Decoder plain(o.spec.element, false), folding(o.spec.element, true);
    alignas(64) uint8_t powers[kGroup][kGroup] = {};
    if (folded && stage_scale_bytes(o, outer, slab.begin / kFoldedBlock, powers)) turn_square(powers);
    for (int64_t i = 0; i < kGroup; ++i, out += kRowLanes)
      for (int64_t l = 0; l < slab.rounded(4 * kLanes); l += 4 * kLanes) {
        const uint8_t* from = lines.data + i * lines.stride + l;
        __builtin_prefetch(from + kLinesAhead * lines.stride);
        const Bytes codes = load_bytes(from);
        const bool fold = folded >> i & 1;
        Halves even, odd;
        if (fold) {
          folding.fold(codes, two_blocks(&powers[i][l / kFoldedBlock]), even, odd);
        } else {
          plain.decode(codes, even, odd);
        }
        Bytes first = reinterpret_cast<Bytes>(even), second = reinterpret_cast<Bytes>(odd);
        interleave_lanes(first, second);
        store_bytes(out + l / kPerLane, first);
        store_bytes(out + l / kPerLane + kLanes, second);
        if (fold && any(folding.special(codes)))
          for (int64_t q = 0; q < kLanes; ++q)
            put_special(o.spec.element, from + 4 * q, out + l / kPerLane + 2 * q, out + l / kPerLane + 2 * q + 1);
      }
  }

  static void pack_columns(const Operand& o, int64_t outer, const Slab& slab, unsigned folded, float* out) {
    StagedCodes staged;
    const LineBytes lines = codes_along(o, outer, slab, staged);
    const Bf16Decoder decoder(o.spec.element, folded != 0);
    alignas(64) uint8_t powers[kGroup][kGroup] = {};
    if (folded) load_powers(o, outer, slab, folded, powers);
    Bytes special = {};
    for (int64_t l = 0; l < slab.rounded(4 * kQuads); l += 4 * kQuads) {
      U32 quads[kQuads][kQuadVectors];
      turn_quads(lines, l, quads);
      const Halves less[2] = {columns_of_block(powers[l / kFoldedBlock]),
                              columns_of_block(powers[l / kFoldedBlock + 1])};
#pragma GCC unroll 4
      for (int q = 0; q < kQuads; ++q) {
        const Bytes codes = reinterpret_cast<Bytes>(quads[q][0]);
        Halves even, odd;
        if (folded) {
          decoder.fold(codes, less[2 * q / kQuads], even, odd);
          special |= decoder.special(codes);
        } else {
          decoder.decode(codes, even, odd);
        }
        store_bytes(lane_of(out, l + 4 * q), reinterpret_cast<Bytes>(even));
        store_bytes(lane_of(out, l + 4 * q) + kGroup, reinterpret_cast<Bytes>(odd));
      }
    }
    if (folded && any(special))
      for (int64_t i = 0; i < kGroup; ++i)
        for (int64_t l = 0; l < slab.rounded(4); l += 4)
          put_special(o.spec.element, lines.data + i * lines.stride + l, lane_of(out, l) + i,
                      lane_of(out, l) + kGroup + i);
  }

 private:
  static_assert(kLanes == kGroup && kFoldedBlock == 2 * kLanes);

  /// Scales of 16 columns, [block][column]; 1 for a column that keeps its own.
  static void load_powers(const Operand& o, int64_t outer, const Slab& slab, unsigned folded,
                          uint8_t (&powers)[kGroup][kGroup]) {
    if (!stage_scale_bytes(o, outer, slab.begin / kFoldedBlock, powers)) turn_square(powers);
    for (int64_t j = 0; j < kGroup; ++j)
      for (int64_t b = 0; !(folded >> j & 1) && b < kGroup; ++b) powers[b][j] = 127;
  }
  static void turn_square(uint8_t (&bytes)[kGroup][kGroup]) {
    transpose_codes(&bytes[0][0], kGroup, &bytes[0][0], kGroup);
  }
  /// The first of the two lanes of packed columns that hold the quad at l.
  static float* lane_of(float* columns, int64_t l) { return columns + l / kPerLane * kGroup; }

  /// Infinities and NaN of a quad, which no scale changes.
  static void put_special(Format f, const uint8_t* quad, float* even, float* odd) {
    for (int c = 0; c < 4; ++c) {
      const float value = quire::decode(f, quad[c]);
      if (std::isfinite(value)) continue;
      const uint16_t bits = f32_to_bf16(value);
      std::memcpy(reinterpret_cast<char*>(c % 2 ? odd : even) + c / 2 * 2, &bits, sizeof bits);
    }
  }

  /// What Bf16Decoder::fold() takes for the E8M0 scales of 16 columns.
  static Halves columns_of_block(const uint8_t* scales) {
    const U32 less = ((kRaised + 127) - load_u8(scales)) << 7;
    return reinterpret_cast<Halves>(less | less << 16);
  }
  /// The same for a row: the first half of the lanes belongs to one block, the second to the next.
  static Halves two_blocks(const uint8_t* scales) {
    const auto both = [](uint8_t byte) { return static_cast<uint32_t>((kRaised + 127 - byte) << 7) * 0x10001u; };
    return reinterpret_cast<Halves>(halves_of(both(scales[0]), both(scales[1])));
  }
};
