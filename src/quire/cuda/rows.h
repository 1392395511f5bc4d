// The kernels of CUDA devices, in order of preference: one array for each kind of problem.
#pragma once

#include <array>

#include "quire/device/device.h"

namespace quire::cuda {

template <class Problem, size_t kCount = 1>
using Rows = std::array<KernelRow<Problem>, kCount>;

// quantize.cpp
extern const Rows<QuantizeProblem, 2> kQuantize;
extern const Rows<AmaxProblem, 2> kAmax;
extern const Rows<ReorderProblem> kReorder;

// dequantize.cpp
extern const Rows<DequantizeProblem, 2> kDequantize;

// gemm.cpp
extern const Rows<GemmProblem, 9> kGemm;

// matmul.cpp
extern const Rows<MatmulProblem, 7> kMatmul;

// pointwise.cpp
extern const Rows<ColumnSumProblem, 2> kColumnSum;
extern const Rows<NormProblem, 2> kNorm;
extern const Rows<NormGradProblem, 2> kNormGrad;
extern const Rows<ActivationProblem, 2> kActivation;
extern const Rows<ActivationGradProblem, 2> kActivationGrad;

// moe.cpp
extern const Rows<RouteProblem, 2> kRoute;
extern const Rows<RouteGradProblem, 2> kRouteGrad;
extern const Rows<CapacityProblem, 2> kLimitCapacity;
extern const Rows<ExpertRowsProblem, 2> kExpertRows;
extern const Rows<ChunkRowsProblem> kChunkRows;

// permute.cpp
extern const Rows<PermuteProblem, 2> kPermute;
extern const Rows<UnpermuteProblem, 2> kUnpermute;
extern const Rows<PermutedDotProblem, 2> kPermutedDot;

// state.cpp
extern const Rows<FingerprintProblem> kFingerprint;
extern const Rows<AdvanceProblem> kAdvance;
extern const Rows<MaximumProblem> kMaximum;
extern const Rows<CollectProblem> kCollect;
extern const Rows<DelayedUpdateProblem> kDelayedUpdate;

}  // namespace quire::cuda
