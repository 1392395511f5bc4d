// The kernels of CUDA devices, in order of preference: one array for each kind of problem.
#pragma once

#include <array>

#include "quire/device/device.h"

namespace quire::cuda {

template <class Problem, size_t kCount = 1>
using Rows = std::array<KernelRow<Problem>, kCount>;

// quantize.cpp
extern const Rows<QuantizeProblem> kQuantize;
extern const Rows<AmaxProblem> kAmax;
extern const Rows<DequantizeProblem> kDequantize;
extern const Rows<ReorderProblem> kReorder;

}  // namespace quire::cuda
