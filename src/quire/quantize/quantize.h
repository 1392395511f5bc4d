// Quantize and dequantize: validate, choose a kernel, run.
#pragma once

#include <string>

#include "quire/device/dispatch.h"
#include "quire/spec/statistics.h"

namespace quire {

/// Writes the codes, scales and amaxes of every present side (numerics.md 1-5). x: f32, f16 or bf16, [M, K], any size,
/// any row stride. Buffers must be those of buffers(spec, {M, K}, direction), without overlap.
/// Throws Error on a problem that breaks a rule; nothing has been written then.
inline void quantize(const QuantizeProblem& problem, const Context& context = host()) { dispatch(problem, context); }

/// The amaxes that quantize() would measure, as a step of its own: given back to it in `amax`, it gives the same bytes.
/// Throws Error for a spec whose scales follow from blocks alone.
inline void amax(const AmaxProblem& problem, const Context& context = host()) { dispatch(problem, context); }

/// Decodes one side (numerics.md 3.4, 4.6, 5.1). Throws Error on a problem that breaks a rule.
inline void dequantize(const DequantizeProblem& problem, const Context& context = host()) {
  dispatch(problem, context);
}

/// Counts the elements of a present side of a problem that quantize() has run on the host. Slow: it computes all scales
/// again.
Statistics statistics(const QuantizeProblem& problem, Direction direction);

/// One line per kernel row, "NAME: VERDICT": "runs", why it cannot take the problem, or which row comes before it.
inline std::string explain(const QuantizeProblem& problem, const Context& context = host()) {
  return explain_choice(problem, context);
}
inline std::string explain(const DequantizeProblem& problem, const Context& context = host()) {
  return explain_choice(problem, context);
}

}  // namespace quire
