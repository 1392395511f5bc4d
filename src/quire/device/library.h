// What a program lends to kernels: a library that multiplies plain matrices, as it lends threads (base/parallel.h). The
// PyTorch layer lends PyTorch's.
#pragma once

#include "quire/base/context.h"
#include "quire/spec/problem.h"

namespace quire {

/// Computes a MatmulProblem that has been checked, on any thread, where the context is: on its device and its stream.
using Matmul = void(const MatmulProblem&, const Context&);

/// Replaces the library for the whole process and returns the one before; null: there is none.
Matmul* set_matmul(Matmul* matmul);
Matmul* matmul_in_use();

}  // namespace quire
