// The kernels of quantize and dequantize, in order of preference.
#pragma once

#include <span>

#include "quire/base/kernel_table.h"
#include "quire/spec/problem.h"

namespace quire {

std::span<const KernelRow<QuantizeProblem>> quantize_kernels();
std::span<const KernelRow<DequantizeProblem>> dequantize_kernels();

}  // namespace quire
