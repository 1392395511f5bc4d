// The products in lanes of bfloat16 and of int8, by tiles. Tested with tiles in plain C++ too (tests/quire/amx.h).
#include <immintrin.h>

#include "quire/cpu/generic/includes.h"
#include "quire/cpu/region.h"

// g++ 12: its own AVX-512 headers trip this warning.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

QUIRE_REGION_BEGIN(
    "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,avx512bf16,amx-tile,amx-bf16,amx-int8")

namespace quire::cpu::avx512_amx {
namespace {
#include "quire/cpu/simd/avx512.h"
//
#include "quire/cpu/simd/avx512_vnni.h"
//
#include "quire/cpu/simd/avx512_bf16.h"
//
#include "quire/cpu/simd/avx512_amx.h"

// The algorithm speaks the vocabulary above.
#include "quire/cpu/generic/gemm/amx_microkernel.inl.h"
#include "quire/cpu/generic/gemm/bf16_microkernel.inl.h"
#include "quire/cpu/generic/gemm/gemm.inl.h"
#include "quire/cpu/generic/gemm/int8_microkernel.inl.h"
#include "quire/cpu/generic/gemm/matmul_tiles.inl.h"

/// A tile of fewer rows costs as much as a full one. The bits are the same.
void multiply_matrix_int8(const GemmProblem& p) {
  (p.out.rows < AmxInt8MicroKernel::kRows ? avx512_vnni::kInt8 : multiply_matrix<AmxInt8MicroKernel>)(p);
}
}  // namespace

const GemmKernel kBf16 = multiply_matrix<AmxMicroKernel>, kInt8 = multiply_matrix_int8,
                 kNvfp4 = multiply_matrix<AmxNvfp4MicroKernel>;
const MatmulKernel kMatmul = matmul_by_tiles;

}  // namespace quire::cpu::avx512_amx

QUIRE_REGION_END
