// Peak rates of arithmetic, the only intrinsics outside quire/cpu/simd. Twelve independent chains hide the latency.
#include <array>

#include "core/machine.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace quire::bench {
namespace {

#if defined(__x86_64__)
constexpr int kChains = 12;
constexpr int kRounds = 200000;

/// `lanes`: multiplications and additions of one instruction.
constexpr double operations(int lanes) { return 2.0 * lanes * kChains * kRounds; }

/// Keeps the chains: the compiler has to have them in registers here.
template <class Vector>
[[gnu::always_inline]] inline void keep(Vector (&chains)[kChains]) {
  for (Vector& v : chains) asm volatile("" : "+v"(v));
}

[[gnu::target("avx2,fma")]] void fma256() {
  __m256 v[kChains] = {}, x = _mm256_set1_ps(0.5f);
  for (int i = 0; i < kRounds; ++i) {
#pragma GCC unroll 12
    for (__m256& chain : v) chain = _mm256_fmadd_ps(x, x, chain);
    for (__m256& chain : v) asm volatile("" : "+x"(chain));
  }
}

[[gnu::target("avx512f")]] void fma512() {
  __m512 v[kChains] = {}, x = _mm512_set1_ps(0.5f);
  for (int i = 0; i < kRounds; ++i) {
#pragma GCC unroll 12
    for (__m512& chain : v) chain = _mm512_fmadd_ps(x, x, chain);
    keep(v);
  }
}

[[gnu::target("avx512f,avx512bf16")]] void bf16_dot512() {
  __m512 v[kChains] = {};
  const __m512bh x = _mm512_cvtne2ps_pbh(_mm512_set1_ps(0.5f), _mm512_set1_ps(0.5f));
  for (int i = 0; i < kRounds; ++i) {
#pragma GCC unroll 12
    for (__m512& chain : v) chain = _mm512_dpbf16_ps(chain, x, x);
    keep(v);
  }
}

[[gnu::target("avx512f,avx512vnni")]] void int8_dot512() {
  __m512i v[kChains] = {};
  const __m512i x = _mm512_set1_epi8(1);
  for (int i = 0; i < kRounds; ++i) {
#pragma GCC unroll 12
    for (__m512i& chain : v) chain = _mm512_dpbusd_epi32(chain, x, x);
    keep(v);
  }
}

[[gnu::target("avx2,avxvnni")]] void int8_dot256() {
  __m256i v[kChains] = {};
  const __m256i x = _mm256_set1_epi8(1);
  for (int i = 0; i < kRounds; ++i) {
#pragma GCC unroll 12
    for (__m256i& chain : v) chain = _mm256_dpbusd_avx_epi32(chain, x, x);
    for (__m256i& chain : v) asm volatile("" : "+x"(chain));
  }
}
#endif

}  // namespace

std::vector<Peak> peaks() {
  std::vector<Peak> found;
#if defined(__x86_64__)
  const bool wide = __builtin_cpu_supports("avx512f");
  if (wide) found.push_back({"fma_f32", operations(16), fma512});
  if (!wide && __builtin_cpu_supports("fma")) found.push_back({"fma_f32", operations(8), fma256});
  if (wide && __builtin_cpu_supports("avx512bf16")) found.push_back({"dot_bf16", operations(32), bf16_dot512});
  if (wide && __builtin_cpu_supports("avx512vnni")) found.push_back({"dot_int8", operations(64), int8_dot512});
  if (!wide && __builtin_cpu_supports("avxvnni")) found.push_back({"dot_int8", operations(32), int8_dot256});
#endif
  return found;
}

}  // namespace quire::bench
