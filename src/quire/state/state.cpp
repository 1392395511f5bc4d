#include "quire/state/state.h"

#include "quire/device/dispatch.h"

namespace quire {

void advance(const AdvanceProblem& problem, const Context& context) { dispatch(problem, context); }
void maximum(const MaximumProblem& problem, const Context& context) { dispatch(problem, context); }
void delayed_collect(const CollectProblem& problem, const Context& context) { dispatch(problem, context); }
void delayed_update(const DelayedUpdateProblem& problem, const Context& context) { dispatch(problem, context); }

}  // namespace quire
