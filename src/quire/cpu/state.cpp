#include "quire/cpu/state.h"

#include "quire/base/fault.h"
#include "quire/base/float_mode.h"
#include "quire/spec/delayed_step.h"

namespace quire::cpu {

// After the last counter comes the first again (numerics.md 0.11: all its 64 bits count).
void advance(const AdvanceProblem& p, const Context&) {
  *p.value = static_cast<int64_t>(static_cast<uint64_t>(*p.value) + 1);
}

void maximum(const MaximumProblem& p, const Context&) {
  const FloatMode mode;
  for (int64_t i = 0; i < p.count; ++i) p.to[i] = maximum_of(p.to[i], p.values[i]);
}

void delayed_collect(const CollectProblem& p, const Context& context) {
  maximum({.to = p.amax, .values = p.of_x, .count = p.count}, context);
  if (p.of_w) maximum({.to = p.amax + p.count, .values = p.of_w, .count = p.count}, context);
  *p.number = *p.rule;
}

void delayed_update(const DelayedUpdateProblem& p, const Context&) {
  const FloatMode mode;
  const auto rule_of = [&](const DelayedState& state) { return find_rule(p.rules, p.rule_count, state); };
  for (const DelayedState& state : p.states) {
    const double* rule = rule_of(state);
    if (rule && !has_length(state, rule))
      raise("delayed_update_", ValueRule::history_length, {.number = rule[kLength], .limit = state.rows});
  }
  for (const DelayedState& state : p.states) {
    const double* rule = rule_of(state);
    if (!rule) continue;
    int64_t& in_use = rows_in_use(state, p.backward);
    for (int64_t slot = 0; slot < state.slots; ++slot) end_step(state, rule, p.backward, in_use, slot);
    in_use = static_cast<int64_t>(rule[kLength]);
  }
}

}  // namespace quire::cpu
