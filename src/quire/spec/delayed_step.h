// The end of a step of delayed scaling, one state and slot at a time: for the kernels of every device.
#pragma once

#include "quire/spec/delayed.h"
#include "quire/spec/state_problem.h"

namespace quire {

/// The row of a state's rule in the table, or null.
constexpr const double* find_rule(const double* rules, int64_t count, const DelayedState& state) {
  const auto number = static_cast<double>(state.usage[0]);
  for (const double* row = rules; row < rules + count * kRuleColumns && row[kNumber] != 0; row += kRuleColumns)
    if (row[kNumber] == number) return row;
  return nullptr;
}

/// Whether the history of a state has as many rows as its rule uses.
constexpr bool has_length(const DelayedState& state, const double* rule) {
  return rule[kLength] >= 1 && rule[kLength] <= static_cast<double>(state.rows);
}

/// Where a state keeps how many rows of its history are in use.
constexpr int64_t& rows_in_use(const DelayedState& state, bool backward) { return state.usage[backward ? 2 : 1]; }

/// What a state's rule says of each slot.
constexpr DelayedRule rule_of(const double* row, bool backward) {
  return {.algorithm = row[kMostRecent] != 0 ? AmaxAlgorithm::most_recent : AmaxAlgorithm::max,
          .largest = static_cast<float>(row[backward ? kLargestBackward : kLargestForward]),
          .margin = static_cast<int>(row[kMargin])};
}

/// The rows of a slot's history that the rule uses.
constexpr AmaxHistory history_of(const DelayedState& s, const double* row, int64_t slot) {
  return {.data = s.history + slot, .length = static_cast<int64_t>(row[kLength]), .stride = s.slots};
}

/// Ends a step of a slot: its amax becomes row 0, which the update rolls on; rows that were in use and are no longer
/// become 0.
constexpr void end_step(const DelayedState& s, const double* row, bool backward, int64_t in_use, int64_t slot) {
  const AmaxHistory history = history_of(s, row, slot);
  for (int64_t i = history.length; i < in_use && i < s.rows; ++i) history[i] = 0;
  history[0] = s.amax[slot];
  s.scale[slot] = delayed_update(rule_of(row, backward), history, s.reduced[slot], s.scale[slot]);
  s.amax[slot] = history[0];
}

}  // namespace quire
