// Whether memory still holds what it held: for codes that are kept while the tensor they came from may change.
#pragma once

#include "quire/base/context.h"
#include "quire/spec/state_problem.h"

namespace quire {

/// Writes the fingerprint of x, which it reads once; or compares it with the expected one, and throws Error where they
/// differ (on another device later: base/fault.h).
void fingerprint(const FingerprintProblem& problem, const Context& context = host());

/// The fingerprint of a matrix in the host's memory.
uint64_t fingerprint(const Matrix& x);

}  // namespace quire
