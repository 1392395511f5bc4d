// Lanes of one float32: exact for every format, on every machine.
#pragma once

#include "quire/cpu/generic/elements/codes.inl.h"
#include "quire/cpu/generic/elements/quad_decoder.inl.h"
#include "quire/cpu/generic/gemm/f32_few_rows.inl.h"
#include "quire/cpu/generic/gemm/gemm.inl.h"
#include "quire/cpu/generic/gemm/micro_tile.inl.h"
#include "quire/cpu/generic/gemm/panel_codes.inl.h"
#include "quire/cpu/generic/gemm/quads.inl.h"

/// kFewRows: of all rows, whose columns are decoded a vector after the other.
template <TileShape kShape, bool kFewRows = false>
struct F32MicroKernel : RegisterMicroKernel {
  using Vector = F32;
  static constexpr int kPerLane = 1;
  static constexpr int64_t kPanelLanes = kPanelDepth, kRowLanes = kPanelDepth;
  static constexpr int kRows = kShape.rows, kVectors = kShape.vectors;
  static constexpr float kUnit = 1;
  static constexpr Folding kFolding = Folding::none;
  static constexpr Keeping kKeeping = kFewRows ? Keeping::never : Keeping::where_needed;
  static constexpr int64_t kMaxBlock = kLongestBlock;

  static F32 load_lanes(const float* p) { return load(p); }
  static void store_lanes(float* p, F32 v) { store(p, v); }
  static F32 broadcast_lane(const float* p) { return broadcast(*p); }
  static F32 accumulate(F32 a, F32 b, F32 sum) { return multiply_add(a, b, sum); }

  /// Columns decoded as they are multiplied.
  struct DecodedCodes {
    StoredColumns<F32MicroKernel> stored;
    QuadDecoder decoder;

    bool normal = false;  ///< of the quads up to the next multiple of kLookedAt

    /// Quads that are looked at together. Few of them have a code that is not normal, and many would be.
    static constexpr int64_t kLookedAt = std::max(1, 64 / (kVectors * kLanes));
    static_assert(kReadStep % (4 * kLookedAt) == 0);

    void look_at(int64_t quad) {
      if (quad % kLookedAt != 0) return;
      // The largest excess over normal codes says whether the quick decoder may take all of them.
      Bytes most{};
#pragma GCC unroll 4
      for (int64_t q = 0; q < kLookedAt; ++q)
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v)
          most = larger(most, decoder.normal_excess(reinterpret_cast<Bytes>(load_quads(stored.at(quad + q, v)))));
      normal = decoder.all_normal(most);
    }
    void read(int64_t quad, F32 (&to)[4][kVectors]) {
      look_at(quad);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        F32 lanes[4];
        const U32 codes = load_quads(stored.quads[v] + quad * kQuadGroup);
        normal ? decoder.decode_normal(reinterpret_cast<Bytes>(codes), lanes) : decoder.decode(codes, lanes);
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) to[c][v] = lanes[c];
      }
    }
  };

  struct FewRowsCodes {
    StoredColumns<F32MicroKernel> stored;
    Format format;
  };
  using ColumnCodes = std::conditional_t<kFewRows, FewRowsCodes, DecodedCodes>;

  template <int Rows, bool Scaled, class Columns>
  static void multiply_rows(const MicroTile& tile, const Columns& columns, const KPanel& panel) {
    if constexpr (kFewRows && std::is_same_v<Columns, ColumnCodes>) {
      multiply_rows_by_codes<F32MicroKernel, Rows, Scaled>(tile, columns, panel);
    } else {
      multiply_rows_in_registers<F32MicroKernel, Rows, Scaled>(tile, columns, panel);
    }
  }

  /// Where the sums of a tile and a quad's lanes have registers; else columns had better be packed first.
  static bool reads(const QuantSpec& spec, int64_t rows) {
    return !spec.packed() && (kFewRows || (rows + 4) * kVectors <= kRegisters);
  }

  template <class Body>
  static bool with_codes(const Operand& o, int64_t col, const KPanel& panel, const uint16_t* /*folded*/,
                         const Body& body) {
    if constexpr (kFewRows) {
      body(ColumnCodes{{o, col, panel}, o.spec.element});
    } else {
      body(ColumnCodes{{o, col, panel}, QuadDecoder(o.spec.element)});
    }
    return true;
  }

  static void pack_rows(const Operand& o, int64_t outer, const KPanel& panel, unsigned /*folded*/, float* out) {
    StagedCodes staged;
    const LineBytes lines = codes_along(o, outer, panel, staged);
    pack_lines<F32MicroKernel>(o, outer, out, [&](int64_t i, float* row) {
      decode_codes(o.spec.element, lines.data + i * lines.stride, panel.padded, row);
    });
  }

  static void pack_columns(const Operand& o, int64_t outer, const KPanel& panel, unsigned /*folded*/, float* out) {
    with_codes_of(o, outer, panel, [&](const auto& codes) {
      if (o.spec.packed()) return decode_columns(codes, PackedDecoder{}, panel.padded, out);
      decode_columns(codes, QuadDecoder(o.spec.element), panel.padded, out);
    });
  }

 private:
  /// QuadDecoder's part for 4-bit codes, a byte each.
  struct PackedDecoder {
    void decode(U32 codes, F32 (&to)[4]) const {
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) to[c] = decode_lanes<kPackedFormat>(codes >> (8 * c) & 0xFF);
    }
  };

  /// Quads that are decoded together: few of their codes are not normal.
  static constexpr int kTogether = 2;
  using Quad = U32[kQuadVectors];

  template <class Source, class Decoder>
  [[gnu::noinline]] static void decode_columns(const Source& codes, const Decoder& how, int64_t count, float* out) {
    const Decoder decoder = how;  // whose members stay in registers
    for (int64_t l = 0; l < count; l += 4 * Source::kStep) {
      Quad quads[Source::kStep];
      codes.read(l, quads);
      for (int q = 0; q < Source::kStep; q += kTogether, out += 4 * kTogether * kLaneGroup)
        decode_quads(quads + q, decoder, out);
    }
  }

  static void decode_quads(const Quad* quads, const PackedDecoder& decoder, float* out) {
    store_quads(quads, out, [&](U32 codes, F32(&lanes)[4]) { decoder.decode(codes, lanes); });
  }
  static void decode_quads(const Quad* quads, const QuadDecoder& decoder, float* out) {
    // Look at all codes first: the quick decoder takes normal ones only.
    Bytes most{};
#pragma GCC unroll 2
    for (int q = 0; q < kTogether; ++q)
#pragma GCC unroll 4
      for (int v = 0; v < kQuadVectors; ++v)
        most = larger(most, decoder.normal_excess(reinterpret_cast<Bytes>(quads[q][v])));
    // Both give the same values; tables take longer.
    if (decoder.all_normal(most)) {
      store_quads(quads, out,
                  [&](U32 codes, F32(&lanes)[4]) { decoder.decode_normal(reinterpret_cast<Bytes>(codes), lanes); });
    } else {
      store_quads(quads, out, [&](U32 codes, F32(&lanes)[4]) { decoder.decode(codes, lanes); });
    }
  }

  template <class Decode>
  static void store_quads(const Quad* quads, float* out, const Decode& decode) {
#pragma GCC unroll 2
    for (int q = 0; q < kTogether; ++q)
#pragma GCC unroll 4
      for (int v = 0; v < kQuadVectors; ++v) {
        F32 lanes[4];
        decode(quads[q][v], lanes);
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) store(out + (4 * q + c) * kLaneGroup + v * kLanes, lanes[c]);
      }
  }
};

/// A few rows in a tile of many columns. Three or four where a subnormal factor costs nothing: tables take as long as
/// what they save then.
inline void multiply_matrix_f32(const GemmProblem& p) {
  const int64_t rows = p.b.spec.interleaved && !p.b.spec.packed() ? p.a.outer : 0;
  if (rows == 1) return multiply_matrix<F32MicroKernel<TileShape{1, 4 * kLaneGroup / kLanes}, true>>(p);
  if (rows >= 1 && rows <= (has_quick_subnormals() ? kMostFewRows : 2))
    return multiply_matrix<F32MicroKernel<TileShape{kMostFewRows, kFewRowsVectors}, true>>(p);
  multiply_matrix<F32MicroKernel<kWideTile>>(p);
}
