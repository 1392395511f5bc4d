// The product by tiles, with the words of cpu/simd/avx512_amx.h in plain C++: so it is tested where AMX is missing.
#if defined(__x86_64__)
#include <immintrin.h>

#include "lanes.h"
#include "quire/cpu/generic/includes.h"
#include "quire/cpu/region.h"

// g++ 12: its own AVX-512 headers trip these warnings.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

QUIRE_REGION_BEGIN("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,avx512bf16")

namespace quire::cpu::amx_in_plain {
namespace {
#include "quire/cpu/simd/avx512.h"
//
#include "quire/cpu/simd/avx512_vnni.h"
//
#include "quire/cpu/simd/avx512_bf16.h"

/// The four tiles of sums; they exist while a session does, which says how deep the others are.
thread_local float tiles[32][32];
thread_local int32_t int8_tiles[32][32];
thread_local int session_depth = 0;

thread_local int64_t session_rows = 0;

template <int kDepth>
struct TileSession {
  explicit TileSession(int64_t rows) { session_depth = kDepth, session_rows = std::min<int64_t>(rows, 16); }
  ~TileSession() { session_depth = 0; }
};

/// Whether the tiles of a session reach the i-th row of 32.
bool in_session(int i) { return i % 16 < session_rows; }

template <int Rows>
void zero_tiles() {
  std::memset(tiles, 0, sizeof tiles);
  std::memset(int8_tiles, 0, sizeof int8_tiles);
}

/// The column `j` of 32.
const float* column(const float* first_columns, const float* last_columns, int j) {
  return j < 16 ? first_columns + j : last_columns + j - 16;
}

template <int Rows>
void load_sums(const float* sums) {
  for (int i = 0; i < Rows; ++i)
    if (in_session(i)) std::memcpy(tiles[i], sums + i * 32, sizeof tiles[i]);
}

template <int Rows>
void multiply_tiles(const float* rows, int64_t row_stride, const float* first_columns, const float* last_columns) {
  const auto bf16 = [](const float* lane, int half) {
    uint16_t bits;
    std::memcpy(&bits, reinterpret_cast<const char*>(lane) + 2 * half, sizeof bits);
    return bf16_to_f32(bits);
  };
  for (int i = 0; i < Rows; ++i)
    for (int j = 0; in_session(i) && j < 32; ++j) {
      const float* const columns = column(first_columns, last_columns, j);
      float parts[2] = {};
      for (int l = 0; l < session_depth; ++l)
        for (int half = 0; half < 2; ++half)
          parts[half] = std::fma(bf16(rows + i * row_stride + l, half), bf16(columns + l * 16, half), parts[half]);
      tiles[i][j] += parts[0] + parts[1];
    }
}

template <int Rows>
void multiply_int8_tiles(const float* rows, int64_t row_stride, const float* first_columns, const float* last_columns) {
  const auto byte = [](const float* lane, int i) { return reinterpret_cast<const uint8_t*>(lane)[i]; };
  for (int i = 0; i < Rows; ++i)
    for (int j = 0; in_session(i) && j < 32; ++j)
      for (int l = 0; l < session_depth; ++l)
        for (int b = 0; b < 4; ++b)
          int8_tiles[i][j] += static_cast<int8_t>(byte(rows + i * row_stride + l, b)) *
                              byte(column(first_columns, last_columns, j) + l * 16, b);
}

/// Nothing but NaN, or the least of integers, without a session.
template <int Rows>
void store_sums(float* sums) {
  for (int i = 0; i < Rows * 32; ++i)
    if (in_session(i / 32)) sums[i] = session_depth ? tiles[i / 32][i % 32] : std::numeric_limits<float>::quiet_NaN();
}
template <int Rows>
void store_sums(int32_t* sums) {
  for (int i = 0; i < Rows * 32; ++i)
    if (in_session(i / 32)) sums[i] = session_depth ? int8_tiles[i / 32][i % 32] : std::numeric_limits<int32_t>::min();
}

#include "quire/cpu/generic/gemm/amx_microkernel.inl.h"
#include "quire/cpu/generic/gemm/bf16_microkernel.inl.h"
#include "quire/cpu/generic/gemm/gemm.inl.h"
#include "quire/cpu/generic/gemm/int8_microkernel.inl.h"
#include "quire/cpu/generic/gemm/matmul_tiles.inl.h"
}  // namespace

const GemmKernel kBf16 = multiply_matrix<AmxMicroKernel>, kInt8 = multiply_matrix<AmxInt8MicroKernel>,
                 kNvfp4 = multiply_matrix<AmxNvfp4MicroKernel>;
const MatmulKernel kMatmul = matmul_by_tiles;

}  // namespace quire::cpu::amx_in_plain

QUIRE_REGION_END
#endif
