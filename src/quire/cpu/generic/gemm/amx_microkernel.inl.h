// The lanes of bf16_microkernel.inl.h and of int8_microkernel.inl.h, multiplied by tiles of 16 or 32 rows x 32 columns.
#pragma once

#include "quire/cpu/generic/elements/codes.inl.h"
#include "quire/cpu/generic/elements/plain.inl.h"
#include "quire/cpu/generic/gemm/bf16_microkernel.inl.h"
#include "quire/cpu/generic/gemm/int8_microkernel.inl.h"
#include "quire/cpu/generic/gemm/micro_tile.inl.h"
#include "quire/cpu/generic/gemm/panel_codes.inl.h"
#include "quire/cpu/generic/gemm/panel_scales.inl.h"
#include "quire/cpu/generic/gemm/quads.inl.h"

struct AmxMicroKernel : Bf16MicroKernel<kWideTile> {
  static constexpr int64_t kDepth = 16;
  using Session = TileSession<kDepth>;
  static constexpr int kRows = 32, kRowStep = 16, kVectors = 32 / kLanes;
  static_assert(kVectors == kWideTile.vectors);
  /// Less than a K-panel has, so that one is packed at a time: of 16 rows it stays in the first-level cache.
  static constexpr int64_t kPackedRows = 1;
  static constexpr Keeping kKeeping = Keeping::always;
  static constexpr int64_t kReadStep = kDepth * kPerLane;

  /// Blocks are at least 32 long: a tile is 16 lanes deep. What follows a K-panel's end is packed as zero.
  template <int Rows, bool Scaled, class Columns>
  [[gnu::noinline]] static void multiply_rows(const MicroTile& tile, const Columns& columns, const KPanel& panel) {
    static_assert((Rows == 16 || Rows == 32) && kVectors * kLanes == 32);
    Columns from = columns;
    // The tiles of sums are the registers here. Without scales they hold the sums of the whole K-panel.
    const int64_t lanes = panel.padded / kPerLane;
    if constexpr (!Scaled) {  // an instruction sums 32 positions, and adds that to the sum
      load_sums<Rows>(tile.sum);
      add_lanes<Rows>(tile, from, 0, lanes);
      store_sums<Rows>(tile.sum);
    } else {
      alignas(64) float sums[Rows * 32];
      for (int64_t block = 0; block < panel.blocks(); ++block) {
        // A block starts at zero in the tiles.
        zero_tiles<Rows>();
        add_lanes<Rows>(tile, from, block * panel.block / kPerLane,
                        std::min(lanes, (block + 1) * panel.block / kPerLane));
        // Tiles cannot be scaled: their sums go through memory.
        store_sums<Rows>(sums);
        for (int64_t r = 0; r < tile.rows; ++r)
          for (int v = 0; v < 32; v += kLanes)
            add_block<true>(load(sums + r * 32 + v), tile.a_scale + r * kPanelBlocks + block,
                            tile.b_scale + block * 32 + v, tile.sum + r * 32 + v);
      }
    }
    if constexpr (requires { from.finish(); }) from.finish();
  }

 private:
  template <int Rows, class MicroKernel>
  static void add_lanes(const MicroTile& tile, const PackedColumns<MicroKernel>& columns, int64_t begin, int64_t end) {
    for (int64_t lane = begin; lane < end; lane += kDepth)
      multiply_tiles<Rows>(tile.a + lane, kRowLanes, columns.at(lane, 0), columns.at(lane, 1));
  }
  /// Columns are decoded a tile ahead of the products, which would wait for what has just been stored.
  template <int Rows, class MicroKernel, class Codes>
  static void add_lanes(const MicroTile& tile, KeptColumns<MicroKernel, Codes>& columns, int64_t begin, int64_t end) {
    for (int64_t lane = begin; lane < end; lane += kDepth) {
      // Decode one tile of columns; read() also packs it.
#pragma GCC unroll 8
      for (int64_t q = 0; q < kDepth * kPerLane / 4; ++q) {
        Halves decoded[4 / kPerLane][kVectors];
        columns.read(lane * kPerLane / 4 + q, decoded);
      }
      // Meanwhile multiply the tile before it.
      if (lane > begin) add_lanes<Rows>(tile, columns.kept, lane - kDepth, lane);
    }
    // The last one.
    add_lanes<Rows>(tile, columns.kept, end - kDepth, end);
  }
};

/// NVFP4, whose block scales are multiplied into codes: an E2M1 value has 2 significant bits and an E4M3 scale 4, so
/// that their product is a bfloat16 number exactly, far from its ends. (numerics.md 7.4)
struct AmxNvfp4MicroKernel : AmxMicroKernel {
  static constexpr Folding kFolding = Folding::all;

  /// Columns decoded as they are multiplied.
  struct Nvfp4Codes {
    StoredColumns<AmxMicroKernel> stored;
    const float (*scales)[kVectors][kLaneGroup];  ///< of each block

    void read(int64_t quad, Halves (&to)[2][kVectors]) const {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        const U32 codes = reinterpret_cast<U32>(load_bytes(stored.at(quad / 2, v))) >> (quad % 2 * 16);
        const F32 scale = load(scales[quad / 4][v]);
        to[0][v] = decode(codes, scale), to[1][v] = decode(codes >> 8, scale);
      }
    }
  };
  static bool reads(const QuantSpec& /*spec*/, int64_t /*rows*/) { return true; }

  template <class Body>
  static bool with_codes(const Operand& o, int64_t col, const KPanel& panel, const uint16_t* /*folded*/,
                         const Body& body) {
    alignas(64) float scales[kPanelBlocks][kVectors][kLaneGroup];
    for (int v = 0; v < kVectors; ++v)
      decode_scales<false>(o, col + v * kLaneGroup, panel, kVectors * kLaneGroup, scales[0][v]);
    body(Nvfp4Codes{{o, col, panel}, scales});
    return true;
  }

  static void pack_rows(const Operand& o, int64_t outer, const KPanel& panel, unsigned /*folded*/, float* out) {
    StagedCodes staged;
    const LineBytes lines = packed_along(o, outer, panel, staged);
    alignas(64) float scales[kLaneGroup][kPanelBlocks];
    decode_scales<true>(o, outer, panel, kPanelBlocks, scales[0]);
    pack_lines<AmxNvfp4MicroKernel>(o, outer, out, [&](int64_t i, float* row) {
      for (int64_t l = 0; l < panel.rounded(kStep); l += kStep) {
        const uint8_t* from = lines.data + i * lines.stride + l / 2;
        __builtin_prefetch(from + kLinesAhead * lines.stride);
        // A vector holds 32 codes, of two blocks: either half of the lanes takes the scale of its block.
        const float first = scales[i][l / kBlock];
        const float second = l + kBlock < panel.size ? scales[i][l / kBlock + 1] : 0.0f;  // padding may be NaN
        const auto scale =
            reinterpret_cast<F32>(halves_of(std::bit_cast<uint32_t>(first), std::bit_cast<uint32_t>(second)));
        store_lanes(row + l / kPerLane, decode(load_u8(from), scale));
      }
    });
  }

  static void pack_columns(const Operand& o, int64_t outer, const KPanel& panel, unsigned /*folded*/, float* out) {
    alignas(64) float scales[kPanelBlocks][kLaneGroup] = {};
    decode_scales<false>(o, outer, panel, kLaneGroup, scales[0]);
    with_pairs_of(o, outer, panel, [&](const auto& pairs) { fold_columns(pairs, panel, scales, out); });
  }

 private:
  static constexpr int64_t kBlock = 16, kStep = 32, kQuadCodes = 2 * kQuadBytes;
  static_assert(kLanes == kLaneGroup && kStep == 2 * kLanes);

  template <class Source>
  [[gnu::noinline]] static void fold_columns(const Source& pairs, const KPanel& panel,
                                             const float (&scales)[kPanelBlocks][kLaneGroup], float* out) {
    constexpr int64_t step = Source::kStep * kQuadCodes;
    for (int64_t l = 0; l < panel.rounded(step); l += step) {
      // A quad of bytes is 8 positions, all of one block: one scale for each line.
      U32 quads[Source::kStep][kQuadVectors];
      pairs.read(l / 2, quads);
#pragma GCC unroll 4
      for (int q = 0; q < Source::kStep; ++q) {
        const F32 scale = load(scales[(l + q * kQuadCodes) / kBlock]);
#pragma GCC unroll 4
        for (int b = 0; b < kQuadBytes; ++b, out += kLaneGroup) store_lanes(out, decode(quads[q][0] >> (8 * b), scale));
      }
    }
  }

  /// Lanes of the two codes in the low byte of each, times the scale.
  static Halves decode(U32 codes, F32 scale) {
    const F32 values = load(kPackedValues.data());
    const F32 even = __builtin_shuffle(values, codes) * scale, odd = __builtin_shuffle(values, codes >> 4) * scale;
    return reinterpret_cast<Halves>(blend_bits(0xFFFF0000u, bits_of(odd), bits_of(even) >> 16));
  }
};

/// Blocks of 16 are a quarter of what a tile could be deep, but their sums are not to be mixed. Gives the bits of
/// Int8MicroKernel: integers are exact, and scaled and added in the same order.
struct AmxInt8MicroKernel : Int8MicroKernel<kInt8Tile> {
  using Session = TileSession<kBlockLanes>;
  static constexpr int kRows = 32, kRowStep = 32, kVectors = 32 / kLanes;
  static constexpr bool kReadsCodes = false;

  template <int Rows, bool Scaled>
  static void multiply_rows(const MicroTile& tile, const PackedColumns<AmxInt8MicroKernel>& columns,
                            const KPanel& panel) {
    static_assert(Rows == kRows && kVectors * kLanes == kRows);
    alignas(64) int32_t products[kRows * kRows];
    for (int64_t block = 0; block < panel.blocks(); ++block) {
      const float* const lanes = columns.lanes + block * kBlockLanes * kLaneGroup;
      // The exact products of one block, by way of memory.
      zero_tiles<Rows>();
      multiply_int8_tiles<Rows>(tile.a + block * kBlockLanes, kRowLanes, lanes, lanes + kLaneGroup * kPanelLanes);
      store_sums<Rows>(products);
      for (int64_t r = 0; r < tile.rows; ++r) {
        // The row's start and scale. The start is added afterwards, because a tile starts at zero.
        const U32 start = reinterpret_cast<U32>(broadcast_int(tile.a + r * kRowLanes + kPanelLanes + block));
        const F32 row_scale = broadcast(tile.a_scale[r * kPanelBlocks + block]);
        for (int v = 0; v < kRows; v += kLanes) {
          U32 product;  // columns that are not there hold anything, and their sums may overflow
          std::memcpy(&product, products + r * kRows + v, sizeof product);
          // Scaled and added in the order of Int8MicroKernel.
          float* const sum = tile.sum + r * kRows + v;
          const F32 scale = row_scale * load(tile.b_scale + block * kRows + v);
          store(sum,
                multiply_add(__builtin_convertvector(reinterpret_cast<I32>(product + start), F32), scale, load(sum)));
        }
      }
    }
  }
};
