// The words of AMX on top of AVX-512 BF16 and VNNI. One or two tiles of 16 rows times two tiles of 16 columns make a
// block of Rows x 32 sums; a tile of rows or columns is kDepth lanes deep.

/// Configures the tiles of this thread while it lives, for products of so many rows: fewer than 16 take less time.
template <int kDepth>
class TileSession {
 public:
  explicit TileSession(int64_t rows) {
    struct alignas(64) Config {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    static_assert(sizeof(Config) == 64);
    const auto height = static_cast<uint8_t>(std::min<int64_t>(rows, 16));
    for (int i = 0; i < 8; ++i) config.row_bytes[i] = 64, config.rows[i] = height;
    for (int i = 4; i < 6; ++i) config.row_bytes[i] = 4 * kDepth;
    for (int i = 6; i < 8; ++i) config.rows[i] = kDepth;
    asm volatile("" ::"r"(&config) : "memory");  // the intrinsic says that it reads 8 bytes of the 64
    _tile_loadconfig(&config);
  }
  TileSession(const TileSession&) = delete;
  TileSession& operator=(const TileSession&) = delete;
  ~TileSession() { _tile_release(); }
};

/// Bytes from one row of sums to the next.
constexpr int64_t kSumStride = 32 * 4;

template <int Rows>
inline void zero_tiles() {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (Rows == 32) {
    _tile_zero(2);
    _tile_zero(3);
  }
}

/// The sums: [Rows][32] floats or integers, of those rows that a session has.
template <int Rows>
inline void load_sums(const float* sums) {
  asm volatile("" ::: "memory");  // the intrinsics do not say that they read memory
  _tile_loadd(0, sums, kSumStride);
  _tile_loadd(1, sums + 16, kSumStride);
  if constexpr (Rows == 32) {
    _tile_loadd(2, sums + 16 * 32, kSumStride);
    _tile_loadd(3, sums + 16 * 32 + 16, kSumStride);
  }
}
template <int Rows>
inline void store_sums(void* to) {
  auto* sums = static_cast<float*>(to);
  _tile_stored(0, sums, kSumStride);
  _tile_stored(1, sums + 16, kSumStride);
  if constexpr (Rows == 32) {
    _tile_stored(2, sums + 16 * 32, kSumStride);
    _tile_stored(3, sums + 16 * 32 + 16, kSumStride);
  }
}

template <int Rows>
inline void load_tiles(const float* rows, int64_t row_stride, const float* first_columns, const float* last_columns) {
  asm volatile("" ::: "memory");
  _tile_loadd(4, rows, row_stride * 4);
  if constexpr (Rows == 32) _tile_loadd(5, rows + 16 * row_stride, row_stride * 4);
  _tile_loadd(6, first_columns, 64);
  _tile_loadd(7, last_columns, 64);
}

/// Adds the products of bfloat16 lanes of rows, `row_stride` floats apart, and of 32 columns: [lanes][16] each.
template <int Rows>
inline void multiply_tiles(const float* rows, int64_t row_stride, const float* first_columns,
                           const float* last_columns) {
  load_tiles<Rows>(rows, row_stride, first_columns, last_columns);
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  if constexpr (Rows == 32) {
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

/// The same of lanes of int8, signed in rows and unsigned in columns; sums are integers.
template <int Rows>
inline void multiply_int8_tiles(const float* rows, int64_t row_stride, const float* first_columns,
                                const float* last_columns) {
  load_tiles<Rows>(rows, row_stride, first_columns, last_columns);
  _tile_dpbsud(0, 4, 6);
  _tile_dpbsud(1, 4, 7);
  if constexpr (Rows == 32) {
    _tile_dpbsud(2, 5, 6);
    _tile_dpbsud(3, 5, 7);
  }
}
