// The product by tiles, with the words of cpu/simd/avx512_amx.h in plain C++: so it is tested where AMX is missing.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>

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

/// The four tiles of sums; they exist while a session does.
thread_local float tiles[32][32];
thread_local bool configured = false;

struct TileSession {
  TileSession() { configured = true; }
  ~TileSession() { configured = false; }
};

void zero_tiles() { std::memset(tiles, 0, sizeof tiles); }

void multiply_tiles(const float* rows, int64_t row_stride, const float* first_columns, const float* last_columns) {
  const auto bf16 = [](const float* lane, int half) {
    uint16_t bits;
    std::memcpy(&bits, reinterpret_cast<const char*>(lane) + 2 * half, sizeof bits);
    return bf16_to_f32(bits);
  };
  for (int i = 0; i < 32; ++i)
    for (int j = 0; j < 32; ++j) {
      const float* const columns = j < 16 ? first_columns + j : last_columns + j - 16;
      float parts[2] = {};
      for (int l = 0; l < 16; ++l)
        for (int half = 0; half < 2; ++half)
          parts[half] = std::fma(bf16(rows + i * row_stride + l, half), bf16(columns + l * 16, half), parts[half]);
      tiles[i][j] += parts[0] + parts[1];
    }
}

/// Nothing but NaN without a session.
void store_tiles(float* sums) {
  for (int i = 0; i < 32 * 32; ++i)
    sums[i] = configured ? tiles[i / 32][i % 32] : std::numeric_limits<float>::quiet_NaN();
}

#include "quire/cpu/generic/product.inl.h"
//
#include "quire/cpu/generic/bf16_lanes.inl.h"
//
#include "quire/cpu/generic/amx_lanes.inl.h"
}  // namespace

const Product kBf16 = multiply<AmxLanes>;

}  // namespace quire::cpu::amx_in_plain

QUIRE_REGION_END
#endif
