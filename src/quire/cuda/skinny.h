// The row of few rows by tensor cores, of both kinds of products (kernels/skinny.h).
#pragma once

#include "quire/base/context.h"
#include "quire/base/kernel_table.h"
#include "quire/spec/problem.h"

namespace quire::cuda {

/// Kernels by the rows of x that they take.
enum class SkinnyKernel : uint8_t { none, narrow, wide };
/// groups: of `rows` rows.
SkinnyKernel skinny_kernel(const RowGroups& groups, int64_t rows);

bool refuses_skinny(const GemmProblem& p, const Context& context, Refusal* refusal);
bool refuses_skinny(const MatmulProblem& p, const Context& context, Refusal* refusal);
void multiply_skinny(const GemmProblem& p, const Context& context);
void multiply_skinny(const MatmulProblem& p, const Context& context);

}  // namespace quire::cuda
