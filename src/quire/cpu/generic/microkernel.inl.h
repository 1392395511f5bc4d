// The register tile of the product.

/// Decoded operands of one register tile over one slab.
struct RegisterTile {
  const float* a;        ///< [rows][kSlab]
  const float* a_scale;  ///< [rows][kSlabBlocks]
  const float* b;        ///< [kTileCols / 16][kSlab][16]
  const float* b_scale;  ///< [blocks][kTileCols]
  float* sum;            ///< [rows][kTileCols], added to
};

/// Codes of a block are multiplied and summed in registers, then scaled and added to the sum: for 4-bit codes the
/// block's sum is exact. Scaled: block scales exist; else they are all 1.
template <int Rows, bool Scaled>
[[gnu::noinline]] void multiply_tile(const RegisterTile& tile, const Slab& slab) {
  const float* a = tile.a;
  const float* b = tile.b;
  const float* a_scale = tile.a_scale;
  const float* b_scale = tile.b_scale;
  for (int64_t left = slab.padded; left > 0; left -= slab.block) {
    F32 t[Rows][kTileVectors] = {};
    const float* const a_end = a + std::min(left, slab.block);
#pragma GCC unroll 2
    for (; a != a_end; ++a, b += kGroup) {
      F32 columns[kTileVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kTileVectors; ++v)
        columns[v] = load(b + v * kLanes / kGroup * (kGroup * kSlab) + v * kLanes % kGroup);
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) {
        const F32 element = broadcast(a[r * kSlab]);
#pragma GCC unroll 4
        for (int v = 0; v < kTileVectors; ++v) t[r][v] = multiply_add(element, columns[v], t[r][v]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kTileVectors; ++v) {
        float* const sum = tile.sum + r * kTileCols + v * kLanes;
        if constexpr (Scaled) {
          const F32 scaled = t[r][v] * broadcast(a_scale[r * kSlabBlocks]);
          store(sum, multiply_add(scaled, load(b_scale + v * kLanes), load(sum)));
        } else {
          store(sum, load(sum) + t[r][v]);
        }
      }
    }
    a_scale += 1;
    b_scale += kTileCols;
  }
}

/// A tile of `rows` rows with the smallest kernel of Rows, Rows/2, Rows/4 ... that covers them.
template <int Rows, bool Scaled>
void multiply_rows(const RegisterTile& tile, const Slab& slab, int64_t rows) {
  if constexpr (Rows > 1)
    if (rows <= Rows / 2) return multiply_rows<Rows / 2, Scaled>(tile, slab, rows);
  multiply_tile<Rows, Scaled>(tile, slab);
}
