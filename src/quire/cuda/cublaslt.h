// What is called of NVIDIA's cuBLASLt, declared here and found at run time: nothing is included or linked, so that one
// binary runs beside every version. The numbers are those of cublasLt.h, which gives them once and for all;
// tests/cuda/test_cublaslt_header.cpp compares them where that header is.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace quire::cuda::lt {

using Handle = struct HandleOf*;
using Desc = struct DescOf*;
using Layout = struct LayoutOf*;
using Preference = struct PreferenceOf*;
using Stream = struct StreamOf*;

/// How a product is computed: found by a heuristic, and meaningful to cuBLASLt alone.
struct Algorithm {
  std::array<uint64_t, 8> data;
};
struct Heuristic {
  Algorithm algorithm;
  size_t workspace;  ///< bytes that it needs
  int status;        ///< of this answer
  float waves;
  std::array<int, 4> reserved;
};

inline constexpr int kSuccess = 0;  ///< what functions return
inline constexpr int kComputeF32 = 68;
inline constexpr int32_t kTransposed = 1;
inline constexpr int32_t kPointersOfDevice = 1;  ///< alpha and beta are memory of the device
inline constexpr uint32_t kPlainEpilogue = 1, kBiasEpilogue = 4;
inline constexpr uint32_t kNoReduction = 0;  ///< no product is split along the contraction

enum Type : int { kF32 = 0, kF16 = 2, kBF16 = 14, kE4M3 = 28, kE5M2 = 29, kE2M1 = 33 };

/// Attributes of a product.
enum Attribute : int {
  kPointerMode = 2,
  kTransposeA = 3,
  kTransposeB = 4,
  kEpilogue = 7,
  kBiasPointer = 8,
  kScalesOfA = 17,
  kScalesOfB = 18,
  kFastAccumulation = 25,
  kBiasType = 26,
  kScaleModeOfA = 31,
  kScaleModeOfB = 32,
};

/// What the scales of an operand are. From 12.8 on; before, all are scalars.
enum ScaleMode : int32_t {
  kScalar = 0,
  kEach16E4M3 = 1,
  kEach32E8M0 = 2,
  kEachLine = 3,
  kEach128 = 4,
  kEach128x128 = 5,
};

enum Wish : int { kMostWorkspace = 1, kReductions = 3, kAlignOfA = 5, kAlignOfB = 6, kAlignOfC = 7, kAlignOfD = 8 };

/// The functions, by their names without cublasLt. Matrices are columns after columns: D = alpha op(A) op(B) + beta C.
struct Functions {
  size_t (*GetVersion)();
  int (*Create)(Handle*);
  int (*MatmulDescCreate)(Desc*, int compute, int scale_type);
  int (*MatmulDescDestroy)(Desc);
  int (*MatmulDescSetAttribute)(Desc, int, const void*, size_t);
  int (*MatrixLayoutCreate)(Layout*, int type, uint64_t rows, uint64_t cols, int64_t ld);
  int (*MatrixLayoutDestroy)(Layout);
  int (*MatmulPreferenceCreate)(Preference*);
  int (*MatmulPreferenceDestroy)(Preference);
  int (*MatmulPreferenceSetAttribute)(Preference, int, const void*, size_t);
  int (*MatmulAlgoGetHeuristic)(Handle, Desc, Layout a, Layout b, Layout c, Layout d, Preference, int most, Heuristic*,
                                int* found);
  int (*Matmul)(Handle, Desc, const void* alpha, const void* a, Layout, const void* b, Layout, const void* beta,
                const void* c, Layout, void* d, Layout, const Algorithm*, void* workspace, size_t workspace_bytes,
                Stream);
};

/// The library that this process has loaded, by PyTorch as a rule, or else that of this machine; null if there is none.
const Functions* find();

}  // namespace quire::cuda::lt
