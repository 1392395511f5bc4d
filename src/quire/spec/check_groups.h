// The rules of problems of groups that hold whatever the ends are, for check_problem(). Kernels check the ends, and the
// problem of each group.
#pragma once

#include <string_view>

#include "quire/spec/problem.h"
#include "quire/spec/state_problem.h"

namespace quire {

/// Throws Error unless they can be groups of `rows` rows.
[[gnu::visibility("hidden")]] void check_groups(std::string_view op, const RowGroups& groups, int64_t rows);

/// What a quantization reads, and who is left out.
[[gnu::visibility("hidden")]] void check_groups(std::string_view op, const QuantizeProblem& problem);
[[gnu::visibility("hidden")]] void check_groups(std::string_view op, const FingerprintProblem& problem);
/// The operand of a product.
[[gnu::visibility("hidden")]] void check_groups(std::string_view op, const Operand& operand);
/// All of a product whose operands have been checked.
[[gnu::visibility("hidden")]] void check_groups(std::string_view op, const GemmProblem& problem);
/// The lists of a product whose sizes have been checked.
[[gnu::visibility("hidden")]] void check_groups(std::string_view op, const MatmulProblem& problem);

}  // namespace quire
