// Lanes of two bfloat16: every 8-bit and 4-bit code is one exactly, so products are exact and sums are float32.
//
// A vector of codes becomes two of bfloat16 by tables: one holds codes 0 and 2 of each quad, the other 1 and 3. Rows
// and columns agree on that order, and that is all a sum of products needs.
#pragma once

#include "quire/cpu/generic/elements/codes.inl.h"
#include "quire/cpu/generic/elements/transpose.inl.h"
#include "quire/cpu/generic/elements/vectors.inl.h"
#include "quire/cpu/generic/gemm/micro_tile.inl.h"
#include "quire/cpu/generic/gemm/panel_codes.inl.h"
#include "quire/cpu/generic/gemm/panel_scales.inl.h"
#include "quire/cpu/generic/gemm/quads.inl.h"
#include "quire/cpu/generic/vocabulary.inl.h"

template <class T>
struct Bf16Types : VocabularyTypes<T> {
  using Pairs = Halves;
  using Table = ByteTable;
};
static_assert(HasBf16Words<Bf16Types<void>>, "the vocabulary lacks a word of bfloat16 lanes");

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
template <Format F>
constexpr Bf16Bytes kBf16Bytes = bf16_bytes(F);

/// Codes to bfloat16. even: codes 0 and 2 of each quad; odd: 1 and 3.
class Bf16Decoder {
 public:
  Bf16Decoder(Format f, bool folds) {
    const Bf16Bytes* t;
    with_element<kElements>(f, [&](auto element) { t = &kBf16Bytes<element>; });
    low_ = load_table((folds ? t->raised_low : t->low).data());
    high_ = load_table((folds ? t->raised_high : t->high).data());
    // Doubled codes are even, so that none reaches 255.
    first_special_ = Bytes{} + static_cast<uint8_t>(std::min(2 * (row(f).max_code() + 1), 255));
  }

  void decode(Bytes codes, Halves& even, Halves& odd) const {
    combine(look_up(low_, codes), look_up(high_, codes) | (codes & 0x80), even, odd);
  }

  /// The same with exponents reduced by `less` >> 7 from where the tables have them. Not for infinities and NaN.
  void fold(Bytes codes, Halves less, Halves& even, Halves& odd) const {
    const Bytes signs = codes & (codes - 1) & 0x80;  // not that of a negative zero, which would be the smallest number
    combine(look_up(low_, codes), look_up(high_, codes) | signs, even, odd);
    even = larger(even, less) - less;  // the subtraction that stops at 0 competes with products
    odd = larger(odd, less) - less;
  }

  /// All bits where a code is an infinity or NaN.
  Bytes special(Bytes codes) const { return reinterpret_cast<Bytes>((codes + codes) >= first_special_); }
  /// Whether there is one, of codes without their uppermost bits.
  bool any_special(Bytes doubled) const { return any_at_least(doubled, first_special_); }

 private:
  static void combine(Bytes low, Bytes high, Halves& even, Halves& odd) {
    const Halves l = reinterpret_cast<Halves>(low), h = reinterpret_cast<Halves>(high);
    even = (l & 0x00FF) | (h << 8);
    odd = (l >> 8) | (h & 0xFF00);
  }

  ByteTable low_, high_;
  Bytes first_special_;
};

/// Blocks of a K-panel whose scales are folded.
constexpr int64_t kPanelPowers = kPanelDepth / kFoldedBlock;

template <TileShape kShape>
struct Bf16MicroKernel : RegisterMicroKernel {
  using Vector = Halves;
  static constexpr int kPerLane = 2;
  static constexpr int64_t kPanelLanes = kPanelDepth / kPerLane, kRowLanes = kPanelLanes;
  static constexpr int kRows = kShape.rows, kVectors = kShape.vectors;
  static constexpr int64_t kMaxBlock = kLongestBlock;
  static constexpr float kUnit = 1;
  static constexpr Folding kFolding = Folding::powers;

  static Halves load_lanes(const float* p) { return load_halves(p); }
  static void store_lanes(float* p, Halves v) { store_bytes(p, reinterpret_cast<Bytes>(v)); }
  static Halves broadcast_lane(const float* p) { return broadcast_halves(p); }
  static F32 accumulate(Halves a, Halves b, F32 sum) { return dot(sum, a, b); }

  template <int TileRows, bool Scaled, class Columns>
  static void multiply_rows(const MicroTile& tile, const Columns& columns, const KPanel& panel) {
    multiply_rows_in_registers<Bf16MicroKernel, TileRows, Scaled>(tile, columns, panel);
  }

  /// Columns decoded as they are multiplied.
  struct Bf16Codes {
    StoredColumns<Bf16MicroKernel> stored;
    Bf16Decoder decoder;

    void read(int64_t quad, Halves (&to)[2][kVectors]) const {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) decoder.decode(load_bytes(stored.at(quad, v)), to[0][v], to[1][v]);
    }
  };

  /// The same, scales multiplied in. Infinities and NaN come out as numbers, which is found out at the end.
  struct FoldedCodes {
    StoredColumns<Bf16MicroKernel> stored;
    Bf16Decoder decoder;
    const Halves (*less)[kVectors];  ///< for each block
    Bytes* largest;
    Bytes doubled = {};  ///< the largest magnitudes

    void read(int64_t quad, Halves (&to)[2][kVectors]) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const Bytes codes = load_bytes(stored.at(quad, v));
        decoder.fold(codes, less[quad / (kFoldedBlock / 4)][v], to[0][v], to[1][v]);
        doubled = larger(doubled, codes + codes);
      }
    }
    void finish() const { *largest = larger(*largest, doubled); }
  };

  static bool reads(const QuantSpec& spec, int64_t /*rows*/) { return !spec.packed(); }
  static bool decodes_slowly(const Operand& columns) { return may_fold(columns); }

  /// Calls body with the columns [col, col + kVectors * kLanes), scales multiplied in where `folded` says so, and
  /// returns true; or false if what they were read as is wrong.
  template <class Body>
  static bool with_codes(const Operand& o, int64_t col, const KPanel& panel, const uint16_t* folded, const Body& body) {
    constexpr int kGroups = kVectors / kQuadVectors;
    const bool folds = std::any_of(folded, folded + kGroups, [](unsigned lines) { return lines != 0; });
    // Without folded scales every code is decoded exactly, and nothing can go wrong.
    const Bf16Decoder decoder(o.spec.element, folds);
    if (!folds) return body(Bf16Codes{{o, col, panel}, decoder}), true;
    // With them: what each block of each column subtracts from its exponents. A column that keeps its scales subtracts
    // what the raised table added.
    alignas(64) Halves less[kPanelPowers][kVectors];
    for (int g = 0; g < kGroups; ++g)
      load_powers<kVectors>(o, col + g * kLaneGroup, panel, folded[g], &less[0][g * kQuadVectors]);
    // The largest code that was read says whether one was infinite or NaN.
    Bytes largest = {};
    body(FoldedCodes{{o, col, panel}, decoder, less, &largest});
    return !decoder.any_special(largest);
  }

  static void pack_rows(const Operand& o, int64_t outer, const KPanel& panel, unsigned folded, float* out) {
    StagedCodes staged;
    const LineBytes lines = codes_along(o, outer, panel, staged);
    const Bf16Decoder plain(o.spec.element, false), folding(o.spec.element, true);
    alignas(64) uint8_t powers[kLaneGroup][kLaneGroup] = {};
    if (folded && stage_scale_bytes(o, outer, panel.begin / kFoldedBlock, powers)) transpose_square(powers);
    pack_lines<Bf16MicroKernel>(o, outer, out, [&](int64_t i, float* row) {
      for (int64_t l = 0; l < panel.rounded(4 * kLanes); l += 4 * kLanes) {
        const uint8_t* from = lines.data + i * lines.stride + l;
        __builtin_prefetch(from + kLinesAhead * lines.stride);
        // Four codes of each of kLanes quads, which become two vectors of lanes: even codes and odd ones.
        const Bytes codes = load_bytes(from);
        const bool fold = folded >> i & 1;
        Halves even, odd;
        if (fold) {
          folding.fold(codes, powers_along(powers[i], l), even, odd);
        } else {
          plain.decode(codes, even, odd);
        }
        // Alternate them, so that the two lanes of a quad are neighbours, as columns have them.
        Bytes first = reinterpret_cast<Bytes>(even), second = reinterpret_cast<Bytes>(odd);
        interleave_lanes(first, second);
        store_bytes(row + l / kPerLane, first);
        store_bytes(row + l / kPerLane + kLanes, second);
        // A folded infinity or NaN came out as a number: put it back, one quad after the other.
        if (fold && any(folding.special(codes)))
          for (int64_t q = 0; q < kLanes; ++q)
            put_special(o.spec.element, from + 4 * q, row + l / kPerLane + 2 * q, row + l / kPerLane + 2 * q + 1);
      }
    });
  }

  static void pack_columns(const Operand& o, int64_t outer, const KPanel& panel, unsigned folded, float* out) {
    with_codes_of(o, outer, panel, [&](const auto& codes) {
      if (!folded) return decode_columns(codes, o.spec.element, panel, out);
      alignas(64) Halves less[kPanelPowers][kQuadVectors];
      load_powers<kQuadVectors>(o, outer, panel, folded, &less[0][0]);
      fold_columns(codes, o.spec.element, panel, less, out);
    });
  }

 private:
  static_assert(kVectors % kQuadVectors == 0 && kFoldedBlock % (2 * kLanes) == 0);

  // Functions of their own: inlined, the tables would not stay in registers.

  template <class Source>
  [[gnu::noinline]] static void decode_columns(const Source& source, Format element, const KPanel& panel, float* out) {
    const Bf16Decoder decoder(element, false);
    for (int64_t l = 0; l < panel.rounded(4 * kLanes); l += 4 * Source::kStep) {
      U32 quads[Source::kStep][kQuadVectors];
      source.read(l, quads);
#pragma GCC unroll 4
      for (int q = 0; q < Source::kStep; ++q, out += 2 * kLaneGroup)
        for (int v = 0; v < kQuadVectors; ++v) {
          Halves even, odd;
          decoder.decode(reinterpret_cast<Bytes>(quads[q][v]), even, odd);
          store_lanes(out + v * kLanes, even);
          store_lanes(out + kLaneGroup + v * kLanes, odd);
        }
    }
  }

  template <class Source>
  [[gnu::noinline]] static void fold_columns(const Source& source, Format element, const KPanel& panel,
                                             const Halves (*less)[kQuadVectors], float* out) {
    const Bf16Decoder decoder(element, true);
    Bytes special = {};
    float* to = out;
    // All codes as if they were finite, and which of them were not.
    for (int64_t l = 0; l < panel.rounded(4 * kLanes); l += 4 * Source::kStep) {
      U32 quads[Source::kStep][kQuadVectors];
      source.read(l, quads);
#pragma GCC unroll 4
      for (int q = 0; q < Source::kStep; ++q, to += 2 * kLaneGroup)
        for (int v = 0; v < kQuadVectors; ++v) {
          const Bytes codes = reinterpret_cast<Bytes>(quads[q][v]);
          Halves even, odd;
          decoder.fold(codes, less[(l + 4 * q) / kFoldedBlock][v], even, odd);
          special |= decoder.special(codes);
          store_lanes(to + v * kLanes, even);
          store_lanes(to + kLaneGroup + v * kLanes, odd);
        }
    }
    // Rare: put infinities and NaN back where they belong.
    if (!any(special)) return;
    for (int64_t i = 0; i < kLaneGroup; ++i)
      for (int64_t l = 0; l < panel.rounded(4); l += 4)
        put_special(element, source.at(i, l), lane_of(out, l) + i, lane_of(out, l) + kLaneGroup + i);
  }

  /// What Bf16Decoder::fold() takes for each block of 16 columns; no change for a column that keeps its scales.
  template <int64_t kStride>
  static void load_powers(const Operand& o, int64_t outer, const KPanel& panel, unsigned folded, Halves* less) {
    // The scale bytes as [block][column], however they are stored.
    alignas(64) uint8_t powers[kLaneGroup][kLaneGroup] = {};
    const int64_t first = panel.begin / kFoldedBlock;
    if (o.spec.interleaved) {
      if (outer < o.outer) stage_scale_quads(o, outer, first, kPanelPowers, powers);
    } else if (!stage_scale_bytes(o, outer, first, powers)) {
      transpose_square(powers);
    }
    // To what is subtracted. A column that is not folded takes the byte of a scale of 1.
    for (int v = 0; v < kQuadVectors; ++v) {
      U32 folds = {};
      for (int i = 0; i < kLanes; ++i) folds[i] = 1u << (v * kLanes + i);
      folds = (folds & folded) == 0 ? U32{} : U32{} + 1;
      for (int64_t b = 0; b < kPanelPowers; ++b)
        less[b * kStride + v] = columns_of_block(folds == 1 ? load_u8(powers[b] + v * kLanes) : U32{} + 127);
    }
  }
  static void transpose_square(uint8_t (&bytes)[kLaneGroup][kLaneGroup]) {
    transpose_codes(&bytes[0][0], kLaneGroup, &bytes[0][0], kLaneGroup);
  }
  /// The first of the two lanes of packed columns that hold the quad at l.
  static float* lane_of(float* columns, int64_t l) { return columns + l / kPerLane * kLaneGroup; }

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
  static Halves columns_of_block(U32 scales) {
    const U32 less = ((kRaised + 127) - scales) << 7;
    return reinterpret_cast<Halves>(less | less << 16);
  }
  /// The same for the positions of a row from `from` on: either half of the lanes belongs to one block.
  static Halves powers_along(const uint8_t* scales, int64_t from) {
    const auto of_block_at = [&](int64_t position) {
      return static_cast<uint32_t>((kRaised + 127 - scales[position / kFoldedBlock]) << 7) * 0x10001u;
    };
    return reinterpret_cast<Halves>(halves_of(of_block_at(from), of_block_at(from + 2 * kLanes)));
  }
};
