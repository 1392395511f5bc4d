// What quire declares of cuBLASLt is what NVIDIA's header declares, where that is found beside cuda.h. Checked when
// this is compiled.
#if __has_include(<cublasLt.h>)
#include <cublasLt.h>
#include <gtest/gtest.h>

#include <type_traits>

#include "quire/cuda/cublaslt.h"

namespace quire::cuda::lt {
namespace {

/// The same types, where opaque pointers, enumerations and int are each one thing.
template <class T>
struct Plain {
  using type = std::conditional_t<std::is_enum_v<T>, int, T>;
};
template <class T>
struct Plain<T*> {
  using type = void*;
};
template <class Result, class... Parameters>
struct Plain<Result (*)(Parameters...)> {
  using type = typename Plain<Result>::type (*)(typename Plain<Parameters>::type...);
};
template <class Ours, class Theirs>
constexpr bool same_function(Ours, Theirs) {
  return std::is_same_v<typename Plain<Ours>::type, typename Plain<Theirs>::type>;
}

#define EXPECT_SAME(ours, theirs) static_assert(static_cast<int64_t>(ours) == static_cast<int64_t>(theirs))
EXPECT_SAME(kSuccess, CUBLAS_STATUS_SUCCESS);
EXPECT_SAME(kComputeF32, CUBLAS_COMPUTE_32F);
EXPECT_SAME(kTransposed, CUBLAS_OP_T);
EXPECT_SAME(kPointersOfDevice, CUBLASLT_POINTER_MODE_DEVICE);
EXPECT_SAME(kPlainEpilogue, CUBLASLT_EPILOGUE_DEFAULT);
EXPECT_SAME(kBiasEpilogue, CUBLASLT_EPILOGUE_BIAS);
EXPECT_SAME(kNoReduction, CUBLASLT_REDUCTION_SCHEME_NONE);
EXPECT_SAME(kF32, CUDA_R_32F);
EXPECT_SAME(kF16, CUDA_R_16F);
EXPECT_SAME(kBF16, CUDA_R_16BF);
EXPECT_SAME(kE4M3, CUDA_R_8F_E4M3);
EXPECT_SAME(kE5M2, CUDA_R_8F_E5M2);
EXPECT_SAME(kE2M1, CUDA_R_4F_E2M1);
EXPECT_SAME(kPointerMode, CUBLASLT_MATMUL_DESC_POINTER_MODE);
EXPECT_SAME(kTransposeA, CUBLASLT_MATMUL_DESC_TRANSA);
EXPECT_SAME(kTransposeB, CUBLASLT_MATMUL_DESC_TRANSB);
EXPECT_SAME(kEpilogue, CUBLASLT_MATMUL_DESC_EPILOGUE);
EXPECT_SAME(kBiasPointer, CUBLASLT_MATMUL_DESC_BIAS_POINTER);
EXPECT_SAME(kScalesOfA, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER);
EXPECT_SAME(kScalesOfB, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER);
EXPECT_SAME(kFastAccumulation, CUBLASLT_MATMUL_DESC_FAST_ACCUM);
EXPECT_SAME(kBiasType, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE);
EXPECT_SAME(kScaleModeOfA, CUBLASLT_MATMUL_DESC_A_SCALE_MODE);
EXPECT_SAME(kScaleModeOfB, CUBLASLT_MATMUL_DESC_B_SCALE_MODE);
EXPECT_SAME(kScalar, CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F);
EXPECT_SAME(kEach16E4M3, CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3);
EXPECT_SAME(kEach32E8M0, CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0);
EXPECT_SAME(kEachLine, CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F);
EXPECT_SAME(kEach128, CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F);
EXPECT_SAME(kEach128x128, CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F);
EXPECT_SAME(kMostWorkspace, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES);
EXPECT_SAME(kReductions, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK);
EXPECT_SAME(kAlignOfA, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES);
EXPECT_SAME(kAlignOfB, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES);
EXPECT_SAME(kAlignOfC, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES);
EXPECT_SAME(kAlignOfD, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES);
#undef EXPECT_SAME

static_assert(sizeof(Algorithm) == sizeof(cublasLtMatmulAlgo_t));
static_assert(sizeof(Heuristic) == sizeof(cublasLtMatmulHeuristicResult_t));
static_assert(offsetof(Heuristic, workspace) == offsetof(cublasLtMatmulHeuristicResult_t, workspaceSize));
static_assert(offsetof(Heuristic, status) == offsetof(cublasLtMatmulHeuristicResult_t, state));

#define EXPECT_SAME(name) static_assert(same_function(decltype(Functions::name){}, decltype(&cublasLt##name){}))
EXPECT_SAME(GetVersion);
EXPECT_SAME(Create);
EXPECT_SAME(MatmulDescCreate);
EXPECT_SAME(MatmulDescDestroy);
EXPECT_SAME(MatmulDescSetAttribute);
EXPECT_SAME(MatrixLayoutCreate);
EXPECT_SAME(MatrixLayoutDestroy);
EXPECT_SAME(MatmulPreferenceCreate);
EXPECT_SAME(MatmulPreferenceDestroy);
EXPECT_SAME(MatmulPreferenceSetAttribute);
EXPECT_SAME(MatmulAlgoGetHeuristic);
EXPECT_SAME(Matmul);
#undef EXPECT_SAME

}  // namespace
}  // namespace quire::cuda::lt
#endif
