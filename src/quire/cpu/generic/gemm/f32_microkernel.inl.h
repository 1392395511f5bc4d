// Lanes of one float32: exact for every format, on every machine.
#pragma once

#include "quire/cpu/generic/elements/codes.inl.h"
#include "quire/cpu/generic/elements/quad_decoder.inl.h"
#include "quire/cpu/generic/gemm/gemm.inl.h"
#include "quire/cpu/generic/gemm/micro_tile.inl.h"
#include "quire/cpu/generic/gemm/panel_codes.inl.h"
#include "quire/cpu/generic/gemm/quads.inl.h"

template <TileShape kShape>
struct F32MicroKernel : RegisterMicroKernel {
  using Vector = F32;
  static constexpr int kPerLane = 1;
  static constexpr int64_t kPanelLanes = kPanelDepth, kRowLanes = kPanelDepth;
  static constexpr int kRows = kShape.rows, kVectors = kShape.vectors;
  static constexpr float kUnit = 1;
  static constexpr Folding kFolding = Folding::none;
  static constexpr int64_t kMaxBlock = kLongestBlock;

  static F32 load_lanes(const float* p) { return load(p); }
  static void store_lanes(float* p, F32 v) { store(p, v); }
  static F32 broadcast_lane(const float* p) { return broadcast(*p); }
  static F32 accumulate(F32 a, F32 b, F32 sum) { return multiply_add(a, b, sum); }

  template <int Rows, bool Scaled, class Columns>
  static void multiply(const MicroTile& tile, const Columns& columns, const KPanel& panel) {
    multiply_micro_tile<F32MicroKernel, Rows, Scaled>(tile, columns, panel);
  }

  /// Columns decoded as they are multiplied.
  struct Codes {
    StoredColumns<F32MicroKernel> stored;
    QuadDecoder decoder;

    bool normal = false;  ///< of the quads up to the next multiple of kLookedAt

    /// Quads that are looked at together. Few of them have a code that is not normal, and many would be.
    static constexpr int64_t kLookedAt = std::max(1, 64 / (kVectors * kLanes));
    static_assert(kReadStep % (4 * kLookedAt) == 0);

    void look_at(int64_t quad) {
      if (quad % kLookedAt != 0) return;
      Bytes most{};
#pragma GCC unroll 4
      for (int64_t q = 0; q < kLookedAt; ++q)
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v)
          most = larger(most, decoder.normal_excess(reinterpret_cast<Bytes>(load_quads(stored.at(quad + q, v)))));
      normal = decoder.all_normal(most);
    }
    /// Of one vector of columns, after look_at().
    void read_vector(int64_t quad, int v, F32 (&to)[4]) const {
      const U32 codes = load_quads(stored.quads[v] + quad * kQuadGroup);
      normal ? decoder.decode_normal(reinterpret_cast<Bytes>(codes), to) : decoder.decode(codes, to);
    }
    void read(int64_t quad, F32 (&to)[4][kVectors]) {
      look_at(quad);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        F32 lanes[4];
        read_vector(quad, v, lanes);
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) to[c][v] = lanes[c];
      }
    }
  };

  static bool reads(const QuantSpec& spec) { return !spec.packed(); }

  template <class Body>
  static bool with_codes(const Operand& o, int64_t col, const KPanel& panel, const uint16_t* /*folded*/,
                         const Body& body) {
    body(Codes{{o, col, panel}, QuadDecoder(o.spec.element)});
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

  template <class Source, class Decoder>
  [[gnu::noinline]] static void decode_columns(const Source& codes, const Decoder& decoder, int64_t count, float* out) {
    for (int64_t l = 0; l < count; l += 4 * Source::kStep) {
      U32 quads[Source::kStep][kQuadVectors];
      codes.read(l, quads);
      for (int q = 0; q < Source::kStep; ++q, out += 4 * kLaneGroup)
        for (int v = 0; v < kQuadVectors; ++v) {
          F32 lanes[4];
          decoder.decode(quads[q][v], lanes);
#pragma GCC unroll 4
          for (int c = 0; c < 4; ++c) store(out + c * kLaneGroup + v * kLanes, lanes[c]);
        }
    }
  }
};

/// One row in a tile of twice as many columns: a sum then waits less often for the one before it.
inline void multiply_f32(const GemmProblem& p) {
  constexpr TileShape kFlatTile{1, 2 * kTileVectors};
  const bool flat = p.a.outer == 1 && p.b.spec.interleaved && !p.b.spec.packed();
  flat ? multiply<F32MicroKernel<kFlatTile>>(p) : multiply<F32MicroKernel<kWideTile>>(p);
}
