// The lanes of bf16_lanes.inl.h, multiplied by tiles of 32 x 32.

struct AmxLanes : Bf16Lanes {
  using Session = TileSession;
  static constexpr int kRows = 32, kLeastRows = 32, kVectors = 32 / kLanes;

  /// Blocks are at least 32 long: a tile is 16 lanes deep. What follows a slab's end is packed as zero.
  template <int Rows, bool Scaled>
  static void multiply(const RegisterTile& tile, const Slab& slab) {
    static_assert(Rows == kRows && kVectors * kLanes == kRows);
    constexpr int64_t kDepth = 16;
    alignas(64) float sums[kRows * kRows];
    int64_t lane = 0;
    for (int64_t block = 0; block < slab.blocks(); ++block) {
      const int64_t end = std::min(slab.padded, (block + 1) * slab.block) / kPerLane;
      zero_tiles();
      for (; lane < end; lane += kDepth)
        multiply_tiles(tile.a + lane, kRowLanes, tile.b + lane * kGroup, tile.b + kGroup * kSlabLanes + lane * kGroup);
      store_tiles(sums);
      for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kRows; v += kLanes) {
          float* const to = tile.sum + r * kRows + v;
          const F32 t = load(sums + r * kRows + v);
          if constexpr (Scaled) {
            const F32 scaled = t * broadcast(tile.a_scale[r * kSlabBlocks + block]);
            store(to, multiply_add(scaled, load(tile.b_scale + block * kRows + v), load(to)));
          } else {
            store(to, load(to) + t);
          }
        }
    }
  }
};
