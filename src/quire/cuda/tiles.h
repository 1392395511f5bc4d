// Rows that read each tile of a matrix once: quantizations of the recipes, and amaxes.
#pragma once

#include "quire/base/kernel_table.h"
#include "quire/spec/problem.h"

namespace quire::cuda {

bool refuses_tiles(const QuantizeProblem& p, const Context& context, Refusal* refusal);
void quantize_tiles(const QuantizeProblem& p, const Context& context);

bool refuses_amax_tiles(const AmaxProblem& p, const Context& context, Refusal* refusal);
void amax_tiles(const AmaxProblem& p, const Context& context);

}  // namespace quire::cuda
