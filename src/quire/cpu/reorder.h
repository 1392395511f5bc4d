// Plain and interleaved order on the host (numerics.md 2.4).
#pragma once

#include "quire/base/context.h"
#include "quire/spec/problem.h"

namespace quire::cpu {

void reorder(const ReorderProblem& problem, const Context& context);

/// Runs `plain`, a kernel that knows plain order only, on an interleaved problem.
void quantize_interleaved(const QuantizeProblem& problem, void (*plain)(const QuantizeProblem&));
void dequantize_interleaved(const DequantizeProblem& problem, void (*plain)(const DequantizeProblem&));

}  // namespace quire::cpu
