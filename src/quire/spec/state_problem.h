// What is asked of the kernels that read or change the state of a module between steps: fingerprints of weights,
// counters of random streams, amaxes, and the scales of delayed scaling (numerics.md 1.4-1.6).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "quire/spec/groups.h"

namespace quire {

/// 64 bits of all elements of x and their places. A changed matrix keeps its fingerprint with a chance of about 2^-64;
/// it is no defence against somebody who seeks one that does. Independent of instruction sets, threads and strides.
struct FingerprintProblem {
  static constexpr std::string_view kOp = "fingerprint";
  Matrix x;
  /// Where the fingerprint goes; or, if `expected` is given, null: the two are compared.
  int64_t* to = nullptr;
  const int64_t* expected = nullptr;
  std::string_view what = kOp;     ///< whose weight x is, for the error
  RowGroups groups{};              ///< of x: a number of each
  std::span<const Matrix> each{};  ///< a matrix for each of equal groups, instead of x's memory
  RowGroups only{};                ///< with ends: groups that have no rows here are not compared

  bool in_groups() const { return !is_one(groups) || only.ends.data || !each.empty(); }
};

/// value += 1.
struct AdvanceProblem {
  static constexpr std::string_view kOp = "advance";
  int64_t* value = nullptr;
};

/// to[i] = max(to[i], values[i]). NaN is ignored (numerics.md 0.8, 1.5).
struct MaximumProblem {
  static constexpr std::string_view kOp = "maximum";
  float* to = nullptr;
  const float* values = nullptr;
  int64_t count = 0;
};

/// The amaxes of x and w of one call join those of the state, as with MaximumProblem, and the state notes its rule.
struct CollectProblem {
  static constexpr std::string_view kOp = "delayed_collect";
  float* amax = nullptr;        ///< [2 * count]: of x, then of w
  const float* of_x = nullptr;  ///< [count]
  const float* of_w = nullptr;  ///< [count]; null: those of w stay
  int64_t count = 0;
  int64_t* number = nullptr;  ///< becomes *rule
  const int64_t* rule = nullptr;
};

/// Columns of the table of rules of delayed scaling, float64 with one row a rule; the first row whose number is 0 ends
/// it.
enum RuleColumn : int64_t { kNumber, kLength, kMostRecent, kMargin, kLargestForward, kLargestBackward, kRuleColumns };

/// One direction of one product's state.
struct DelayedState {
  float* history = nullptr;        ///< [rows, slots]
  float* scale = nullptr;          ///< [slots]
  float* amax = nullptr;           ///< [slots]: the current step's, row 0 of the contract's history
  const float* reduced = nullptr;  ///< [slots]: amax after a reduction over devices; may be amax itself
  int64_t* usage = nullptr;        ///< [3]: {rule, rows of the history in use forward, and backward}
  int64_t rows = 0, slots = 0;
};

/// Ends a step of each state whose rule is in the table; the others are left alone. Of a history the rule's `length`
/// rows are used and the others zeroed, so that the length may change between steps (numerics.md 1.4, 1.6). A rule
/// whose length is not from 1 to the rows of a history is an error, and no state has changed then.
struct DelayedUpdateProblem {
  static constexpr std::string_view kOp = "delayed_update";
  std::span<const DelayedState> states;  ///< a list (problem.h): it is gone when `run` has returned
  const double* rules = nullptr;         ///< [rule_count, kRuleColumns]
  int64_t rule_count = 0;
  bool backward = false;
};

std::string to_string(const FingerprintProblem& p);
std::string to_string(const AdvanceProblem& p);
std::string to_string(const MaximumProblem& p);
std::string to_string(const CollectProblem& p);
std::string to_string(const DelayedUpdateProblem& p);

}  // namespace quire
