// The lanes of bf16_lanes.inl.h, multiplied by tiles of 32 x 32.

struct AmxLanes : Bf16Lanes {
  using Session = TileSession;
  static constexpr int kRows = 32, kLeastRows = 32, kVectors = 32 / kLanes;
  static constexpr bool kReadsCodes = false;

  /// Blocks are at least 32 long: a tile is 16 lanes deep. What follows a slab's end is packed as zero.
  template <int Rows, bool Scaled>
  static void multiply(const RegisterTile& tile, const PackedColumns<AmxLanes>& columns, const Slab& slab) {
    static_assert(Rows == kRows && kVectors * kLanes == kRows);
    constexpr int64_t kDepth = 16;
    alignas(64) float sums[kRows * kRows];
    int64_t lane = 0;
    for (int64_t block = 0; block < slab.blocks(); ++block) {
      const int64_t end = std::min(slab.padded, (block + 1) * slab.block) / kPerLane;
      zero_tiles();
      for (; lane < end; lane += kDepth)
        multiply_tiles(tile.a + lane, kRowLanes, columns.lanes + lane * kGroup,
                       columns.lanes + kGroup * kSlabLanes + lane * kGroup);
      store_tiles(sums);
      for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kRows; v += kLanes)
          add_block<Scaled>(load(sums + r * kRows + v), tile.a_scale + r * kSlabBlocks + block,
                            tile.b_scale + block * kRows + v, tile.sum + r * kRows + v);
    }
  }
};
