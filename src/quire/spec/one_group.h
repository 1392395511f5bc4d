// One group that has all rows is one tensor: its problem is the one of that tensor, and goes to the kernels of those.
#pragma once

#include "quire/spec/grouped_problem.h"
#include "quire/spec/state_problem.h"

namespace quire {

/// Whether no end says where the one group lies.
inline bool is_one(const RowGroups& g) { return g.count == 1 && g.ends.data == nullptr; }

/// The problem of the tensor. Each takes a problem of groups of which is_one() holds, and throws Error unless flat
/// buffers have the tensor's size.
QuantizeProblem problem_of_one(const GroupedQuantizeProblem& p);
DequantizeProblem problem_of_one(const GroupedDequantizeProblem& p);
GemmProblem problem_of_one(const GroupedGemmProblem& p);
MatmulProblem problem_of_one(const GroupedMatmulProblem& p);
ColumnSumProblem problem_of_one(const GroupedColumnSumProblem& p);
FingerprintProblem problem_of_one(const GroupedFingerprintProblem& p);

}  // namespace quire
