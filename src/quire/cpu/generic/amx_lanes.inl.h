// The lanes of bf16_lanes.inl.h and of int8_lanes.inl.h, multiplied by tiles of 32 x 32.

struct AmxLanes : Bf16Lanes {
  static constexpr int64_t kDepth = 16;
  using Session = TileSession<kDepth>;
  static constexpr int kRows = 32, kLeastRows = 32, kVectors = 32 / kLanes;
  static constexpr bool kReadsCodes = false;

  /// Blocks are at least 32 long: a tile is 16 lanes deep. What follows a slab's end is packed as zero.
  template <int Rows, bool Scaled>
  static void multiply(const RegisterTile& tile, const PackedColumns<AmxLanes>& columns, const Slab& slab) {
    static_assert(Rows == kRows && kVectors * kLanes == kRows);
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

/// Blocks of 16 are a quarter of what a tile could be deep, but their sums are not to be mixed. Gives the bits of
/// Int8Lanes: integers are exact, and scaled and added in the same order.
struct AmxInt8Lanes : Int8Lanes {
  using Session = TileSession<kBlockLanes>;
  static constexpr int kRows = 32, kLeastRows = 32, kVectors = 32 / kLanes;
  static constexpr bool kReadsCodes = false;

  template <int Rows, bool Scaled>
  static void multiply(const RegisterTile& tile, const PackedColumns<AmxInt8Lanes>& columns, const Slab& slab) {
    static_assert(Rows == kRows && kVectors * kLanes == kRows);
    alignas(64) int32_t products[kRows * kRows];
    for (int64_t block = 0; block < slab.blocks(); ++block) {
      const float* const lanes = columns.lanes + block * kBlockLanes * kGroup;
      zero_tiles();
      multiply_int8_tiles(tile.a + block * kBlockLanes, kRowLanes, lanes, lanes + kGroup * kSlabLanes);
      store_tiles(products);
      for (int r = 0; r < kRows; ++r) {
        const U32 start = reinterpret_cast<U32>(broadcast_int(tile.a + r * kRowLanes + kSlabLanes + block));
        const F32 row_scale = broadcast(tile.a_scale[r * kSlabBlocks + block]);
        for (int v = 0; v < kRows; v += kLanes) {
          U32 product;  // lines that are not there hold anything, and their sums may overflow
          std::memcpy(&product, products + r * kRows + v, sizeof product);
          float* const sum = tile.sum + r * kRows + v;
          const F32 scale = row_scale * load(tile.b_scale + block * kRows + v);
          store(sum,
                multiply_add(__builtin_convertvector(reinterpret_cast<I32>(product + start), F32), scale, load(sum)));
        }
      }
    }
  }
};
