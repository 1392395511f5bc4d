// The state of modules, on the host.
#pragma once

#include "quire/base/context.h"
#include "quire/spec/state_problem.h"

namespace quire::cpu {

void advance(const AdvanceProblem& problem, const Context& context);
void maximum(const MaximumProblem& problem, const Context& context);
void delayed_collect(const CollectProblem& problem, const Context& context);
void delayed_update(const DelayedUpdateProblem& problem, const Context& context);

}  // namespace quire::cpu
