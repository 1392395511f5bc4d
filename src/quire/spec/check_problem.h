// The rules a problem must obey before a kernel may see it.
#pragma once

#include "quire/spec/moe_problem.h"
#include "quire/spec/pointwise_problem.h"
#include "quire/spec/state_problem.h"

namespace quire {

/// Throws Error unless there is memory where `count` elements lie.
void check_memory(std::string_view op, std::string_view what, const void* memory, int64_t count);

// Those of matrices are hidden, so that the library can inline them.

/// Throws Error unless sizes are not negative, and everything that is made of them fits int64.
[[gnu::visibility("hidden")]] void check_sizes(std::string_view op, std::string_view what, int64_t rows, int64_t cols);
/// The same of a matrix, whose memory is there and does not reach further than int64 can count.
[[gnu::visibility("hidden")]] void check_extent(std::string_view op, std::string_view what, const Matrix& m);
/// The same of one whose elements are float32, float16 or bfloat16.
[[gnu::visibility("hidden")]] void check_matrix(std::string_view op, std::string_view what, const Matrix& m);
/// Throws Error unless the matrix has these sizes.
[[gnu::visibility("hidden")]] void check_shape(std::string_view op, std::string_view what, const Matrix& m,
                                               int64_t rows, int64_t cols);
/// Throws Error unless this is float32, float16 or bfloat16.
[[gnu::visibility("hidden")]] void check_float(std::string_view op, std::string_view what, DType dtype);
/// check_matrix() of one that is written: its rows do not overlap.
[[gnu::visibility("hidden")]] void check_output(std::string_view op, std::string_view what, const MutableMatrix& m);

/// Throws Error, naming the operation, the rule, the values and the remedy, unless the problem is valid: dtypes are
/// floating where values are read or written, sizes are not negative and their byte counts fit int64, shapes agree,
/// pointers are null only where nothing is stored, and specs are ones that QuantSpec::parse can give. Of groups: what
/// can be known without their ends; kernels check the ends, and the problem of each group.
void check_problem(const QuantizeProblem& problem);
void check_problem(const AmaxProblem& problem);
void check_problem(const DequantizeProblem& problem);
void check_problem(const ReorderProblem& problem);
void check_problem(const GemmProblem& problem);
void check_problem(const MatmulProblem& problem);
void check_problem(const ColumnSumProblem& problem);
void check_problem(const NormProblem& problem);
void check_problem(const NormGradProblem& problem);
void check_problem(const ActivationProblem& problem);
void check_problem(const ActivationGradProblem& problem);
void check_problem(const RouteProblem& problem);
void check_problem(const RouteGradProblem& problem);
void check_problem(const CapacityProblem& problem);
void check_problem(const PermuteProblem& problem);
void check_problem(const UnpermuteProblem& problem);
void check_problem(const PermutedDotProblem& problem);
void check_problem(const ExpertRowsProblem& problem);
void check_problem(const ChunkRowsProblem& problem);
void check_problem(const FingerprintProblem& problem);
void check_problem(const AdvanceProblem& problem);
void check_problem(const MaximumProblem& problem);
void check_problem(const CollectProblem& problem);
void check_problem(const DelayedUpdateProblem& problem);

}  // namespace quire
