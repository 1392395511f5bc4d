// What every instruction set provides: the same algorithms (cpu/generic) compiled against its vocabulary (cpu/simd).
#pragma once

#include "quire/spec/pointwise_problem.h"

namespace quire::cpu {

/// Kernels take valid problems only: dispatch() checks before it calls.
struct Kernels {
  void (*quantize)(const QuantizeProblem&);
  void (*dequantize)(const DequantizeProblem&);
  void (*gemm)(const GemmProblem&);
  void (*column_sum)(const ColumnSumProblem&);
  void (*norm)(const NormProblem&);
  void (*norm_grad)(const NormGradProblem&);
  void (*activation)(const ActivationProblem&);
  void (*activation_grad)(const ActivationGradProblem&);
  uint64_t (*fingerprint)(const Matrix&);
  void (*amax)(const AmaxProblem&);
  void (*matmul)(const MatmulProblem&);
};

/// A product of operands of some formats only (Isa says which).
using GemmKernel = void (*)(const GemmProblem&);
using MatmulKernel = void (*)(const MatmulProblem&);

namespace scalar {
extern const Kernels kKernels;
}
namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}
namespace avx2_int8 {
extern const GemmKernel kInt8;
}
namespace neon {
extern const Kernels kKernels;
}
namespace avx2_vnni {
extern const GemmKernel kInt8;
}
namespace avx512_int8 {
extern const GemmKernel kInt8;
}
namespace avx512_vnni {
extern const GemmKernel kInt8;
}
namespace avx512_bf16 {
extern const GemmKernel kBf16;
}
namespace avx512_amx {
extern const GemmKernel kBf16, kInt8, kNvfp4;
extern const MatmulKernel kMatmul;
}  // namespace avx512_amx
namespace neon_dot {
extern const GemmKernel kInt8;
}
namespace neon_bf16 {
extern const GemmKernel kBf16;
}

}  // namespace quire::cpu
