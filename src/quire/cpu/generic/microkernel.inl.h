// The register tile of the product.
//
// Panels are made of lanes of four bytes: one float32, two bfloat16 or four int8, neighbours along the contraction,
// held in memory of floats. Rows keep their lanes one after the other; columns keep a lane of 16 columns after the
// other. A kind of lanes is a class L that says how codes become lanes and how lanes are multiplied:
//   kSlabLanes        lanes of one line of a slab
//   kRowLanes         floats from one packed row to the next
//   Session           what a thread needs while it multiplies
//   kLeastRows        of its kernels
//   kRows, kVectors   shape of the register tile: rows, and vectors of columns
//   kMaxBlock         most positions that are summed before anything else
//   kUnit             what a product of 1 means: a power of two
//   kFolds            whether scales that are powers of two may be multiplied into the codes
//   pack_rows, pack_columns   16 lines of a slab to lanes
//   multiply          the tile itself

/// Most positions along the contraction whose products are summed before anything else (numerics.md 0.20).
constexpr int64_t kLongestBlock = 128;

/// Packed operands of one register tile over one slab.
struct RegisterTile {
  const float* a;        ///< [rows][L::kRowLanes]
  const float* a_scale;  ///< [rows][kSlabBlocks]
  const float* b;        ///< [columns / 16][L::kSlabLanes][16]
  const float* b_scale;  ///< [blocks][columns]
  float* sum;            ///< [rows][columns], added to
};

/// Adds what a block summed to, times its row's scale and its columns' scales if it has some.
template <bool Scaled>
inline void add_block(F32 block, const float* row_scale, const float* column_scales, float* sum) {
  if constexpr (Scaled) {
    store(sum, multiply_add(block * broadcast(*row_scale), load(column_scales), load(sum)));
  } else {
    store(sum, load(sum) + block);
  }
}

/// Lanes of a block are multiplied and summed in registers, then scaled and added to the sum: for 4-bit codes the
/// block's sum is exact. Scaled: block scales exist; else they are all 1.
template <class L, int Rows, bool Scaled>
[[gnu::noinline]] void multiply_lanes(const RegisterTile& tile, const Slab& slab) {
  constexpr int kCols = L::kVectors * kLanes;
  const float* a = tile.a;
  const float* b = tile.b;
  const float* a_scale = tile.a_scale;
  const float* b_scale = tile.b_scale;
  for (int64_t left = slab.padded; left > 0; left -= slab.block) {
    F32 t[Rows][L::kVectors] = {};
    const float* const a_end = a + std::min(left, slab.block) / L::kPerLane;
#pragma GCC unroll 2
    for (; a != a_end; ++a, b += kGroup) {
      typename L::Vector columns[L::kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < L::kVectors; ++v)
        columns[v] = L::load_lanes(b + v * kLanes / kGroup * (kGroup * L::kSlabLanes) + v * kLanes % kGroup);
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) {
        const typename L::Vector element = L::broadcast_lane(a + r * L::kRowLanes);
#pragma GCC unroll 4
        for (int v = 0; v < L::kVectors; ++v) t[r][v] = L::accumulate(element, columns[v], t[r][v]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < L::kVectors; ++v)
        add_block<Scaled>(t[r][v], a_scale + r * kSlabBlocks, b_scale + v * kLanes, tile.sum + r * kCols + v * kLanes);
    }
    a_scale += 1;
    b_scale += kCols;
  }
}

/// A tile of `rows` rows with the smallest kernel that covers them: 12, 8, 4, 2, 1 or 8, 4, 2, 1 or 6, 4, 2, 1 rows.
template <class L, int Rows, bool Scaled>
void multiply_rows(const RegisterTile& tile, const Slab& slab, int64_t rows) {
  constexpr int kFewer = Rows % 3 == 0 ? Rows / 3 * 2 : Rows / 2;
  if constexpr (Rows > L::kLeastRows)
    if (rows <= kFewer) return multiply_rows<L, kFewer, Scaled>(tile, slab, rows);
  L::template multiply<Rows, Scaled>(tile, slab);
}
