// Quantization and its inverse as steps of other rows, such as norms whose result is quantized.
#pragma once

#include "quire/base/context.h"
#include "quire/spec/problem.h"

namespace quire::cuda {

/// Launches what a QuantizeProblem asks for, which has been checked.
void quantize(const QuantizeProblem& problem, const Context& context);
/// The same of a DequantizeProblem.
void dequantize(const DequantizeProblem& problem, const Context& context);

}  // namespace quire::cuda
