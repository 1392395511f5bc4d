#include "quire/cpu/state.h"

#include <algorithm>
#include <cmath>

#include "quire/base/fault.h"
#include "quire/base/float_mode.h"
#include "quire/spec/delayed.h"

namespace quire::cpu {
namespace {

/// The row of a state's rule in the table, or null.
const double* find_rule(const DelayedUpdateProblem& p, const DelayedState& state) {
  const auto number = static_cast<double>(state.usage[0]);
  for (const double* row = p.rules; row < p.rules + p.rule_count * kRuleColumns && row[kNumber] != 0;
       row += kRuleColumns)
    if (row[kNumber] == number) return row;
  return nullptr;
}

/// One state, slot by slot: its amaxes become row 0, which the update rolls on.
void end_step(const DelayedState& s, const double* row, bool backward) {
  const DelayedRule rule{.algorithm = row[kMostRecent] != 0 ? AmaxAlgorithm::most_recent : AmaxAlgorithm::max,
                         .largest = static_cast<float>(row[backward ? kLargestBackward : kLargestForward]),
                         .margin = static_cast<int>(row[kMargin])};
  const auto length = static_cast<int64_t>(row[kLength]);
  int64_t& in_use = s.usage[backward ? 2 : 1];
  if (in_use > length) std::fill(s.history + length * s.slots, s.history + std::min(in_use, s.rows) * s.slots, 0.0F);
  in_use = length;
  for (int64_t i = 0; i < s.slots; ++i) {
    s.history[i] = s.amax[i];
    const AmaxHistory history{.data = s.history + i, .length = length, .stride = s.slots};
    s.scale[i] = quire::delayed_update(rule, history, s.reduced[i], s.scale[i]);
    s.amax[i] = s.history[i];
  }
}

}  // namespace

// After the last counter comes the first again (numerics.md 0.11: all its 64 bits count).
void advance(const AdvanceProblem& p, const Context&) {
  *p.value = static_cast<int64_t>(static_cast<uint64_t>(*p.value) + 1);
}

void maximum(const MaximumProblem& p, const Context&) {
  const FloatMode mode;
  for (int64_t i = 0; i < p.count; ++i) p.to[i] = std::fmax(p.to[i], p.values[i]);
}

void delayed_collect(const CollectProblem& p, const Context& context) {
  maximum({.to = p.amax, .values = p.of_x, .count = p.count}, context);
  if (p.of_w) maximum({.to = p.amax + p.count, .values = p.of_w, .count = p.count}, context);
  *p.number = *p.rule;
}

void delayed_update(const DelayedUpdateProblem& p, const Context&) {
  const FloatMode mode;
  for (const DelayedState& state : p.states) {
    const double* rule = find_rule(p, state);
    if (rule && !(rule[kLength] >= 1 && rule[kLength] <= static_cast<double>(state.rows)))
      raise("delayed_update_", ValueRule::history_length, {.number = rule[kLength], .limit = state.rows});
  }
  for (const DelayedState& state : p.states)
    if (const double* rule = find_rule(p, state)) end_step(state, rule, p.backward);
}

}  // namespace quire::cpu
