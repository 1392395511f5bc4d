// The contract transcribed: slow, obvious, the oracle of every kernel and the last row of the kernel table.
#pragma once

#include "quire/spec/problem.h"
#include "quire/spec/statistics.h"

namespace quire::reference {

/// As quire::quantize, of a valid problem, on this thread alone (numerics.md 1.5, 2.2, 3.1, 4.1, 5.1-5.8).
void quantize(const QuantizeProblem& problem);

/// As quire::amax, of a valid problem (numerics.md 1.2, 5.2).
void amax(const AmaxProblem& problem);

/// As quire::dequantize, of a valid problem: value * scale in f32, then one rounding to the output's dtype
/// (numerics.md 3.4, 4.6, 5.1, 0.6).
void dequantize(const DequantizeProblem& problem);

/// As quire::statistics.
Statistics statistics(const QuantizeProblem& problem, Direction direction);

}  // namespace quire::reference
