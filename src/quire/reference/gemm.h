// The contract's products in double: slow, obvious, the oracle of every kernel and the last row of the kernel table.
#pragma once

#include "quire/spec/problem.h"

namespace quire::reference {

/// As quire::gemm, of a valid problem, on this thread alone (numerics.md 7.4, 5.10). Everything up to the rounding to
/// out's dtype is double.
void gemm(const GemmProblem& problem);

/// As quire::column_sum, of a valid problem, summed in double.
void column_sum(const ColumnSumProblem& problem);

/// As quire::matmul, of a valid problem; operands as they are, summed in double.
void matmul(const MatmulProblem& problem);

}  // namespace quire::reference
