// A few rows times columns of 8-bit codes, in lanes of float32: columns are decoded as they are multiplied.
#pragma once

#include "quire/cpu/generic/elements/quad_decoder.inl.h"
#include "quire/cpu/generic/gemm/micro_tile.inl.h"
#include "quire/cpu/generic/gemm/quads.inl.h"

/// Most rows of such a tile, and its vectors of columns: so many that a sum need not wait for the one before it.
constexpr int kMostFewRows = 4, kFewRowsVectors = kLanes > 8 ? 4 : 8;

/// Rows are multiplied by this, so that their products with codes whose exponents are too small (FieldDecoder) stay far
/// from both ends of float32. All factors are powers of two, and a block's sum is freed of them before its scales are
/// applied: the bits are those of any other tile.
constexpr float kLift = 0x1p100f;

/// The columns of a tile, and its rows, lifted, over a K-panel.
template <class MicroKernel, int Rows>
struct FewRows {
  static constexpr int kVectors = MicroKernel::kVectors;
  /// Vectors of columns that share the elements of rows, where these are many.
  static constexpr int kTogether = Rows <= 2 ? 1 : 2;
  /// Those that are looked at together. Few of them have a code that is not normal, and many would be.
  static constexpr int kLookedAt = std::min(kVectors, std::max(1, 32 / kLanes));
  static_assert(kVectors % kTogether == 0 && kVectors % kLookedAt == 0);
  using Sums = F32[kVectors][Rows];

  FewRows(const float* a, const StoredColumns<MicroKernel>& columns, Format element_format, const KPanel& panel)
      : stored(columns), format(element_format) {
    for (int r = 0; r < Rows; ++r)
      for (int64_t i = 0; i < panel.padded; i += kLanes)
        store(rows[r] + i, load(a + r * MicroKernel::kRowLanes + i) * kLift);
  }

  F32 element(int r, int64_t l) const { return broadcast(rows[r][l]); }

  /// The sums of the products of quads, if no code is infinite or NaN. Subnormal codes are subnormal in float32 too.
  [[gnu::always_inline]] bool sum_finite(int64_t quad, int64_t end, Sums& sum) const {
    // Sums stay in registers. `most` follows the largest code: one comparison at the end replaces one for each quad.
    const FieldDecoder decoder(format);
    for_each([&](int v, int r) { sum[v][r] = F32{}; });
    Bytes most{};
    for (; quad < end; ++quad)
#pragma GCC unroll 8
      for (int first = 0; first < kVectors; first += kTogether) {
        // Decode a quad of kTogether vectors by moving its bits. Values are too small by a constant, which the lifted
        // rows make up for.
        FieldDecoder::Pairs codes[kTogether];
#pragma GCC unroll 2
        for (int v = 0; v < kTogether; ++v) {
          const Bytes bytes = reinterpret_cast<Bytes>(load_quads(stored.at(quad, first + v)));
          most = larger(most, FieldDecoder::magnitude(bytes));
          codes[v] = decoder.pairs(bytes);
        }
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) {
          // One position of the quad: each decoded lane meets all rows.
          F32 lanes[kTogether];
#pragma GCC unroll 2
          for (int v = 0; v < kTogether; ++v) lanes[v] = decoder.lane(codes[v], c);
#pragma GCC unroll 4
          for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 2
            for (int v = 0; v < kTogether; ++v)
              sum[first + v][r] = multiply_add(element(r, 4 * quad + c), lanes[v], sum[first + v][r]);
        }
      }
    return decoder.all_finite(most);
  }

  /// The same of any codes, and never by a subnormal float32: vectors with a code that is not normal are decoded by
  /// tables, and the rows become smaller, by as much as the values of such codes are.
  [[gnu::noinline]] void sum_any(int64_t quad, int64_t end, Sums& sum) const {
    const QuadDecoder decoder(format);
    std::memset(sum, 0, sizeof sum);
    for (; quad < end; ++quad)
      for (int first = 0; first < kVectors; first += kLookedAt) {
        // Read kLookedAt vectors, and find whether all their codes are normal.
        Bytes codes[kLookedAt], most{};
        for (int v = 0; v < kLookedAt; ++v) {
          codes[v] = reinterpret_cast<Bytes>(load_quads(stored.at(quad, first + v)));
          most = larger(most, decoder.normal_excess(codes[v]));
        }
        const bool normal = decoder.all_normal(most);
        // Tables give true values; the quick decoder gives small ones. The unit makes both products alike.
        const F32 unit = broadcast(normal ? 1.0f : FieldDecoder::unit(format));
        for (int v = 0; v < kLookedAt; ++v) {
          F32 lanes[4];
          normal ? decoder.decode_fields(codes[v], lanes) : decoder.decode(reinterpret_cast<U32>(codes[v]), lanes);
          for (int c = 0; c < 4; ++c)
#pragma GCC unroll 4
            for (int r = 0; r < Rows; ++r)
              sum[first + v][r] = multiply_add(element(r, 4 * quad + c) * unit, lanes[c], sum[first + v][r]);
        }
      }
  }

  /// Calls body with each vector and row, as constants once loops are unrolled.
  template <class Body>
  [[gnu::always_inline]] static void for_each(const Body& body) {
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) body(v, r);
  }

  const StoredColumns<MicroKernel>& stored;
  Format format;
  alignas(64) float rows[Rows][kPanelDepth];
};

/// multiply_rows_in_registers() of codes.
template <class MicroKernel, int Rows, bool Scaled>
[[gnu::noinline]] void multiply_rows_by_codes(const MicroTile& tile, const typename MicroKernel::ColumnCodes& columns,
                                              const KPanel& panel) {
  using Few = FewRows<MicroKernel, Rows>;
  constexpr int kCols = MicroKernel::kVectors * kLanes;
  // Lifted copies of the rows, and the factor that frees a block of the lift.
  const Few few(tile.a, columns.stored, columns.format, panel);
  const F32 block_unit = broadcast(1 / (kLift * FieldDecoder::unit(columns.format)));
  const bool quick = has_quick_subnormals() && FieldDecoder::takes(columns.format);
  const int64_t quads = ceil_div(panel.size, 4);
  for (int64_t quad = 0, block = 0; quad < quads; ++block) {
    const int64_t end = std::min(quads, quad + panel.block / 4);
    // The quick way first. If a code was infinite or NaN, its sums are void and the block is summed again.
    typename Few::Sums sum;
    if (!quick || !few.sum_finite(quad, end, sum)) {
      typename Few::Sums any;  // in memory, so that the sum need not be
      few.sum_any(quad, end, any);
      Few::for_each([&](int v, int r) { sum[v][r] = any[v][r]; });
    }
    // As multiply_rows_in_registers() ends a block, so that the bits are the same.
    quad = end;
    Few::for_each([&](int v, int r) {
      add_block<Scaled>(sum[v][r] * block_unit, tile.a_scale + r * kPanelBlocks + block,
                        tile.b_scale + block * kCols + v * kLanes, tile.sum + r * kCols + v * kLanes);
    });
  }
}
