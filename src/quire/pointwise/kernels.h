// The kernels of norms and activations and of their gradients, in order of preference.
#pragma once

#include <span>

#include "quire/base/kernel_table.h"
#include "quire/spec/pointwise_problem.h"

namespace quire {

template <class Problem>
std::span<const KernelRow<Problem>> pointwise_kernels();

}  // namespace quire
