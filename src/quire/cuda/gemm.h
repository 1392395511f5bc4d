// How products of codes are divided among kernels, for whoever needs one that goes to the same kernel.
#pragma once

#include "quire/base/context.h"
#include "quire/spec/problem.h"

namespace quire::cuda {

/// Whether the row "decode" computes a product by its kernel of large tiles.
bool takes_large_tiles(const GemmProblem& p, const Context& context);

}  // namespace quire::cuda
