// Lanes of one float32: exact for every format, on every machine.
#pragma once

#include "quire/cpu/generic/elements/codes.inl.h"
#include "quire/cpu/generic/gemm/micro_tile.inl.h"
#include "quire/cpu/generic/gemm/panel_codes.inl.h"
#include "quire/cpu/generic/gemm/quads.inl.h"

struct F32MicroKernel : RegisterMicroKernel {
  using Vector = F32;
  static constexpr int kPerLane = 1;
  static constexpr int64_t kPanelLanes = kPanelDepth, kRowLanes = kPanelDepth;
  static constexpr int kRows = kTileRows, kVectors = kTileVectors;
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
    Format element;

    void read(int64_t quad, F32 (&to)[4][kVectors]) const {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const U32 codes = reinterpret_cast<U32>(load(reinterpret_cast<const float*>(stored.at(quad, v))));
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c)
          with_element<kByteElements>(element, [&](auto f) { to[c][v] = decode_lanes<f>(codes >> (8 * c) & 0xFF); });
      }
    }
  };

  static bool reads(const QuantSpec& spec) { return !spec.packed(); }

  template <class Body>
  static bool with_codes(const Operand& o, int64_t col, const KPanel& panel, const uint16_t* /*folded*/,
                         const Body& body) {
    body(Codes{{o, col, panel}, o.spec.element});
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
      with_element<kElements>(o.spec.element, [&](auto f) { decode_columns<f>(codes, panel.padded, out); });
    });
  }

 private:
  template <Format F, class Source>
  static void decode_columns(const Source& codes, int64_t count, float* out) {
    for (int64_t l = 0; l < count; l += 4 * Source::kStep) {
      U32 quads[Source::kStep][kQuadVectors];
      codes.read(l, quads);
      for (int q = 0; q < Source::kStep; ++q)
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c, out += kLaneGroup)
          for (int v = 0; v < kQuadVectors; ++v)
            store(out + v * kLanes, decode_lanes<F>(quads[q][v] >> (8 * c) & 0xFF));
    }
  }
};
