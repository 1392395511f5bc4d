// The words of AMX-BF16 on top of AVX-512 BF16: tiles of 16 rows of 16 lanes. Two tiles of rows times two tiles of
// columns make a block of 32 x 32 sums.

/// Configures the tiles of this thread while it lives.
class TileSession {
 public:
  TileSession() {
    struct alignas(64) Config {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    static_assert(sizeof(Config) == 64);
    for (int i = 0; i < 8; ++i) config.row_bytes[i] = 64, config.rows[i] = 16;
    _tile_loadconfig(&config);
  }
  TileSession(const TileSession&) = delete;
  TileSession& operator=(const TileSession&) = delete;
  ~TileSession() { _tile_release(); }
};

inline void zero_tiles() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

/// Adds the products of 16 lanes of 32 rows, `row_stride` floats apart, and of 32 columns: [16 lanes][16] each.
inline void multiply_tiles(const float* rows, int64_t row_stride, const float* first_columns,
                           const float* last_columns) {
  asm volatile("" ::: "memory");  // the intrinsics do not say that they read memory
  _tile_loadd(4, rows, row_stride * 4);
  _tile_loadd(5, rows + 16 * row_stride, row_stride * 4);
  _tile_loadd(6, first_columns, 64);
  _tile_loadd(7, last_columns, 64);
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

/// The sums: [32][32].
inline void store_tiles(float* sums) {
  _tile_stored(0, sums, 128);
  _tile_stored(1, sums + 16, 128);
  _tile_stored(2, sums + 16 * 32, 128);
  _tile_stored(3, sums + 16 * 32 + 16, 128);
}
