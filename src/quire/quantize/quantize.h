// Quantize and dequantize: validate, choose a kernel, run.
#pragma once

#include <span>
#include <string>

#include "quire/spec/problem.h"

namespace quire {

/// Writes the codes, scales and amaxes of every present side (numerics.md 1-5). x: f32, f16 or bf16, [M, K], any size,
/// any row stride. Buffers must be those of buffers(spec, {M, K}, direction), without overlap.
/// Throws Error on a problem that breaks a rule; nothing has been written then.
void quantize(const QuantizeProblem& problem);

/// Several tensors, each as by itself. All are checked before the first one is quantized.
void quantize_each(std::span<const QuantizeProblem> problems);

/// Decodes one side (numerics.md 3.4, 4.6, 5.1). Throws Error on a problem that breaks a rule.
void dequantize(const DequantizeProblem& problem);

/// One line per kernel row, "NAME: VERDICT": "runs", why it cannot take the problem, or which row comes before it.
std::string explain(const QuantizeProblem& problem);
std::string explain(const DequantizeProblem& problem);

}  // namespace quire
