// Products of instruction sets that few machines have, so compiled that others can test them.
#pragma once

#include "quire/cpu/kernels.h"

#if defined(__x86_64__)
namespace quire::cpu {

/// By tiles (AMX), with the words of cpu/simd/avx512_amx.h in plain C++.
namespace amx_in_plain {
extern const GemmKernel kBf16, kInt8, kNvfp4;
extern const MatmulKernel kMatmul;
}  // namespace amx_in_plain
/// In int8 lanes of AVX2, with the instruction that AVX-512 VNNI has under another name than AVX-VNNI.
namespace avx2_by_avx512 {
extern const GemmKernel kInt8;
}

}  // namespace quire::cpu
#endif
