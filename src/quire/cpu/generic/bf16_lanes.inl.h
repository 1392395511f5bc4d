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
    combine(look_up(low_, codes), look_up(high_, codes) | (codes & 0x80), even, odd);
  }

  /// The same with exponents reduced by `less` >> 7 from where the tables have them. Not for infinities and NaN.
  void fold(Bytes codes, Halves less, Halves& even, Halves& odd) const {
    combine(look_up(low_, codes), look_up(high_, codes), even, odd);
    const Halves signs = reinterpret_cast<Halves>(codes);
    even = subtract_to_zero(even, less) | ((signs << 8) & 0x8000);
    odd = subtract_to_zero(odd, less) | (signs & 0x8000);
  }

  /// All bits where a code is an infinity or NaN.
  Bytes special(Bytes codes) const { return reinterpret_cast<Bytes>((codes + codes) >= first_special_); }
  bool any_special(Bytes codes) const { return any_at_least(codes + codes, first_special_); }

 private:
  static void combine(Bytes low, Bytes high, Halves& even, Halves& odd) {
    const Halves l = reinterpret_cast<Halves>(low), h = reinterpret_cast<Halves>(high);
    even = (l & 0x00FF) | (h << 8);
    odd = (l >> 8) | (h & 0xFF00);
  }

  ByteTable low_, high_;
  Bytes first_special_;
};

/// Rows x Vectors: shape of the register tile.
template <int Rows, int Vectors>
struct Bf16LanesOf {
  using Vector = Halves;
  struct Session {};
  static constexpr int kPerLane = 2;
  static constexpr int64_t kSlabLanes = kSlab / kPerLane, kRowLanes = kSlabLanes;
  static constexpr int kLeastRows = 1;
  static constexpr int kRows = Rows, kVectors = Vectors;
  static constexpr int64_t kMaxBlock = kLongestBlock;
  static constexpr float kUnit = 1;
  static constexpr bool kFolds = true;
  static constexpr bool kReadsCodes = true;

  static Halves load_lanes(const float* p) { return load_halves(p); }
  static Halves broadcast_lane(const float* p) { return broadcast_halves(p); }
  static F32 accumulate(Halves a, Halves b, F32 sum) { return dot(sum, a, b); }

  template <int TileRows, bool Scaled, class Columns>
  static void multiply(const RegisterTile& tile, const Columns& columns, const Slab& slab) {
    multiply_lanes<Bf16LanesOf, TileRows, Scaled>(tile, columns, slab);
  }

  /// Columns decoded as they are multiplied.
  struct Codes {
    StoredColumns<Bf16LanesOf> stored;
    Bf16Decoder decoder;

    void read(int64_t quad, Halves (&to)[2][kVectors]) const {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) decoder.decode(load_bytes(stored.at(quad, v)), to[0][v], to[1][v]);
    }
  };

  /// The same, scales multiplied in.
  struct FoldedCodes {
    StoredColumns<Bf16LanesOf> stored;
    Bf16Decoder decoder;
    Format element;
    const Halves (*less)[kVectors];  ///< for each block

    void read(int64_t quad, Halves (&to)[2][kVectors]) const {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const uint8_t* const from = stored.at(quad, v);
        const Bytes codes = load_bytes(from);
        decoder.fold(codes, less[quad / (kFoldedBlock / 4)][v], to[0][v], to[1][v]);
        if (decoder.any_special(codes)) [[unlikely]] {
          Halves even = to[0][v], odd = to[1][v];  // whose addresses are taken, and not the lanes'
          put_specials(element, from, even, odd);
          to[0][v] = even, to[1][v] = odd;
        }
      }
    }
  };

  /// Folding and many rows want more registers than there are, if two vectors of columns are multiplied at a time.
  static int64_t coded_rows(const QuantSpec& spec) {
    return spec.packed() ? 0 : spec.row().scale == ScaleKind::e8m0 && kVectors > 1 ? 8 : kRows;
  }

  /// Calls body with the columns [col, col + kVectors * kLanes), scales multiplied in where `folded` says so.
  template <size_t Groups, class Body>
  static void with_codes(const Operand& o, int64_t col, const Slab& slab, const unsigned (&folded)[Groups],
                         const Body& body) {
    static_assert(Groups == kVectors);
    const bool folds = std::any_of(folded, folded + Groups, [](unsigned lines) { return lines != 0; });
    const Bf16Decoder decoder(o.spec.element, folds);
    if (!folds) return body(Codes{{o, col, slab}, decoder});
    alignas(64) uint8_t powers[kGroup][kGroup];
    alignas(64) Halves less[kSlab / kFoldedBlock][kVectors];
    for (int v = 0; v < kVectors; ++v) {
      load_powers(o, col + v * kGroup, slab, folded[v], powers);
      for (int64_t b = 0; b < kSlab / kFoldedBlock; ++b) less[b][v] = columns_of_block(powers[b]);
    }
    body(FoldedCodes{{o, col, slab}, decoder, o.spec.element, less});
  }

  static void pack_rows(const Operand& o, int64_t outer, const Slab& slab, unsigned folded, float* out) {
    StagedCodes staged;
    const LineBytes lines = codes_along(o, outer, slab, staged);
    const Bf16Decoder plain(o.spec.element, false), folding(o.spec.element, true);
    alignas(64) uint8_t powers[kGroup][kGroup] = {};
    if (folded && stage_scale_bytes(o, outer, slab.begin / kFoldedBlock, powers)) turn_square(powers);
    pack_lines<Bf16LanesOf>(o, outer, out, [&](int64_t i, float* row) {
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
        store_bytes(row + l / kPerLane, first);
        store_bytes(row + l / kPerLane + kLanes, second);
        if (fold && any(folding.special(codes)))
          for (int64_t q = 0; q < kLanes; ++q)
            put_special(o.spec.element, from + 4 * q, row + l / kPerLane + 2 * q, row + l / kPerLane + 2 * q + 1);
      }
    });
  }

  static void pack_columns(const Operand& o, int64_t outer, const Slab& slab, unsigned folded, float* out) {
    with_codes_of(o, outer, slab, [&](const auto& codes) {
      if (!folded) return decode_columns(codes, o.spec.element, slab, out);
      alignas(64) uint8_t powers[kGroup][kGroup] = {};
      load_powers(o, outer, slab, folded, powers);
      fold_columns(codes, o.spec.element, slab, powers, out);
    });
  }

 private:
  static_assert(kLanes == kGroup && kFoldedBlock == 2 * kLanes);

  template <class Source>
  static void decode_columns(const Source& source, Format element, const Slab& slab, float* out) {
    const Bf16Decoder decoder(element, false);
    for (int64_t l = 0; l < slab.rounded(4 * kLanes); l += 4 * Source::kStep) {
      U32 quads[Source::kStep][kQuadVectors];
      source.read(l, quads);
#pragma GCC unroll 4
      for (int q = 0; q < Source::kStep; ++q) {
        Halves even, odd;
        decoder.decode(reinterpret_cast<Bytes>(quads[q][0]), even, odd);
        store_bytes(lane_of(out, l + 4 * q), reinterpret_cast<Bytes>(even));
        store_bytes(lane_of(out, l + 4 * q) + kGroup, reinterpret_cast<Bytes>(odd));
      }
    }
  }

  template <class Source>
  static void fold_columns(const Source& source, Format element, const Slab& slab,
                           const uint8_t (&powers)[kGroup][kGroup], float* out) {
    const Bf16Decoder decoder(element, true);
    Bytes special = {};
    for (int64_t l = 0; l < slab.rounded(4 * kLanes); l += 4 * Source::kStep) {
      U32 quads[Source::kStep][kQuadVectors];
      source.read(l, quads);
      const Halves less[2] = {columns_of_block(powers[l / kFoldedBlock]),
                              columns_of_block(powers[(l + 2 * Source::kStep) / kFoldedBlock])};
#pragma GCC unroll 4
      for (int q = 0; q < Source::kStep; ++q) {
        const Bytes codes = reinterpret_cast<Bytes>(quads[q][0]);
        Halves even, odd;
        decoder.fold(codes, less[2 * q / Source::kStep], even, odd);
        special |= decoder.special(codes);
        store_bytes(lane_of(out, l + 4 * q), reinterpret_cast<Bytes>(even));
        store_bytes(lane_of(out, l + 4 * q) + kGroup, reinterpret_cast<Bytes>(odd));
      }
    }
    if (!any(special)) return;
    for (int64_t i = 0; i < kGroup; ++i)
      for (int64_t l = 0; l < slab.rounded(4); l += 4)
        put_special(element, source.at(i, l), lane_of(out, l) + i, lane_of(out, l) + kGroup + i);
  }

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

  /// The infinities and NaN of a vector of quads.
  [[gnu::noinline]] static void put_specials(Format f, const uint8_t* quads, Halves& even, Halves& odd) {
    alignas(64) float first[kLanes], second[kLanes];
    store_bytes(first, reinterpret_cast<Bytes>(even));
    store_bytes(second, reinterpret_cast<Bytes>(odd));
    for (int i = 0; i < kLanes; ++i) put_special(f, quads + i * kQuadBytes, first + i, second + i);
    even = load_halves(first), odd = load_halves(second);
  }

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

using Bf16Lanes = Bf16LanesOf<kTileRows, kTileVectors>;
using TallBf16Lanes = Bf16LanesOf<kGroup, 1>;
