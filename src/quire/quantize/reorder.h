// Codes and scales of a quantized tensor in the other order: plain or interleaved (numerics.md 2.4).
#pragma once

#include "quire/base/context.h"
#include "quire/spec/problem.h"

namespace quire {

/// Writes what `problem.from` stores in the order that its spec does not have. Its own inverse: reordered twice, bytes
/// are what they were. Padding is zero. Amaxes are the same in both orders and not touched.
/// Throws Error on a problem that breaks a rule; nothing has been written then.
void reorder(const ReorderProblem& problem, const Context& context = host());

}  // namespace quire
