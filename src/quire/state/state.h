// Changes of a module's state between steps, each on the device where the state lies.
#pragma once

#include "quire/base/context.h"
#include "quire/spec/state_problem.h"

namespace quire {

void advance(const AdvanceProblem& problem, const Context& context = host());
void maximum(const MaximumProblem& problem, const Context& context = host());
void delayed_collect(const CollectProblem& problem, const Context& context = host());

/// Throws Error for a rule whose length is not from 1 to the rows of a history (on another device later: base/fault.h);
/// no state has changed then.
void delayed_update(const DelayedUpdateProblem& problem, const Context& context = host());

}  // namespace quire
