// A few rows times columns of 8-bit codes, in lanes of float32: columns are decoded as they are multiplied.
#pragma once

#include "quire/cpu/generic/elements/quad_decoder.inl.h"
#include "quire/cpu/generic/gemm/micro_tile.inl.h"
#include "quire/cpu/generic/gemm/quads.inl.h"

/// Rows are multiplied by this, so that their products with codes whose exponents are too small (decode_fields()) stay
/// far from both ends of float32. All factors are powers of two, and a block's sum is freed of them before its scales
/// are applied: the bits are those of any other tile.
constexpr float kLift = 0x1p100f;

/// Vectors of columns that are looked at together. Few of them have a code that is not normal, and many would be.
template <int kVectors>
constexpr int kVectorsLookedAt = std::min(kVectors, std::max(1, 32 / kLanes));

/// Adds the products of a quad of rows with some vectors of columns, one after the other, whose lanes then need few
/// registers. kNormal: all codes are normal; else rows become smaller, by as much as the values of such codes are.
template <bool kNormal, int Rows, int kCount>
[[gnu::always_inline]] inline void add_quad(const float* rows, const U32 (&codes)[kCount], const QuadDecoder& decoder,
                                            float field_unit, F32 (*sum)[Rows]) {
  const auto element = [&](int r, int c) {
    const float x = rows[r * kPanelDepth + c];
    return broadcast(kNormal ? x : x * field_unit);
  };
#pragma GCC unroll 8
  for (int v = 0; v < kCount; ++v) {
    F32 lanes[4];
    kNormal ? decoder.decode_fields(reinterpret_cast<Bytes>(codes[v]), lanes) : decoder.decode(codes[v], lanes);
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c)
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) sum[v][r] = multiply_add(element(r, c), lanes[c], sum[v][r]);
  }
}

/// multiply_micro_tile() of codes. Where these are normal, shifts and masks alone decode them.
template <class MicroKernel, int Rows, bool Scaled>
[[gnu::noinline]] void multiply_by_codes(const MicroTile& tile, const typename MicroKernel::Codes& columns,
                                         const KPanel& panel) {
  constexpr int kVectors = MicroKernel::kVectors, kTogether = kVectorsLookedAt<kVectors>, kCols = kVectors * kLanes;
  static_assert(kVectors % kTogether == 0);
  const auto stored = columns.stored;
  const QuadDecoder decoder = columns.decoder;
  const float field_unit = decoder.field_unit();
  const F32 block_unit = broadcast(1 / (kLift * field_unit));
  alignas(64) float lifted[Rows][kPanelDepth];
  for (int r = 0; r < Rows; ++r)
    for (int64_t i = 0; i < panel.padded; i += kLanes)
      store(lifted[r] + i, load(tile.a + r * MicroKernel::kRowLanes + i) * kLift);
  const int64_t quads = ceil_div(panel.size, 4);
  for (int64_t quad = 0, block = 0; quad < quads; ++block) {
    F32 sum[kVectors][Rows] = {};
    for (const int64_t end = std::min(quads, quad + panel.block / 4); quad < end; ++quad)
#pragma GCC unroll 8
      for (int first = 0; first < kVectors; first += kTogether) {
        U32 codes[kTogether];
        Bytes most{};
#pragma GCC unroll 8
        for (int v = 0; v < kTogether; ++v) {
          codes[v] = load_quads(stored.at(quad, first + v));
          most = larger(most, decoder.normal_excess(reinterpret_cast<Bytes>(codes[v])));
        }
        const float* const rows = lifted[0] + 4 * quad;
        decoder.all_normal(most) ? add_quad<true, Rows>(rows, codes, decoder, field_unit, sum + first)
                                 : add_quad<false, Rows>(rows, codes, decoder, field_unit, sum + first);
      }
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v)
        add_block<Scaled>(sum[v][r] * block_unit, tile.a_scale + r * kPanelBlocks + block,
                          tile.b_scale + block * kCols + v * kLanes, tile.sum + r * kCols + v * kLanes);
  }
}
