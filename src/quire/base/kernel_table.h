// Choice of a kernel: rows in order of preference, each able to say why it would not take a problem.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "quire/base/check.h"
#include "quire/base/context.h"

namespace quire {

/// Why a row does not take a problem.
struct Refusal {
  std::string why;
  /// Whether the row takes no problem where it is: the machine, the device or the program lacks something.
  bool of_place = false;
};

template <class Problem>
struct KernelRow {
  std::string_view name;
  /// Whether this row cannot take the problem. Says why in *refusal, unless that is null: every call asks, few want
  /// words. Null: it takes all.
  bool (*refuses)(const Problem&, const Context&, Refusal* refusal);
  void (*run)(const Problem&, const Context&);

  bool takes(const Problem& problem, const Context& context, Refusal* refusal = nullptr) const {
    return !refuses || !refuses(problem, context, refusal);
  }
};

/// For rows: refuses, for a reason made of these parts, which lies in the problem.
template <class... Parts>
bool refused(Refusal* refusal, const Parts&... parts) {
  if (refusal) *refusal = {.why = text(parts...)};
  return true;
}

/// The same of a reason that lies in the place, which is asked before the problem is.
template <class... Parts>
bool refused_here(Refusal* refusal, const Parts&... parts) {
  if (refusal) *refusal = {.why = text(parts...), .of_place = true};
  return true;
}

/// For rows: `kRefuses` of a row that is not batch invariant, which contexts with Context::batch_invariant leave out.
/// A row is batch invariant if a row of its result has the same bits whatever the other rows are, however many, and
/// wherever it lies in memory; and if it takes the problem whatever they are. A kernel whose sums have the property,
/// but which takes few rows only, has not: more rows are computed by another kernel.
template <class Problem, bool (*kRefuses)(const Problem&, const Context&, Refusal*)>
bool varies(const Problem& problem, const Context& context, Refusal* refusal) {
  if (context.batch_invariant)
    return refused_here(refusal,
                        "a row of its result depends on the other rows, and kernels=batch_invariant forbids that");
  return kRefuses(problem, context, refusal);
}

template <class Problem>
std::string row_names(std::span<const KernelRow<Problem>> rows) {
  std::string names;
  for (const auto& row : rows) names += (names.empty() ? "" : ", ") + std::string(row.name);
  return names;
}

/// What kernels a problem may go to: those of one device, and the name of the one that QUIRE_KERNEL forces, if any.
template <class Problem>
struct Choice {
  std::span<const KernelRow<Problem>> rows;
  std::string_view forced{};

  bool asked(const KernelRow<Problem>& row) const { return forced.empty() || row.name == forced; }
};

/// Throws Error, beginning with `op`: no row takes the problem.
template <class Problem>
[[noreturn]] void refuse(std::string_view op, const Choice<Problem>& choice, const Problem& problem,
                         const Context& context) {
  std::string reasons;
  bool problem_helps = false;
  for (const auto& row : choice.rows) {
    Refusal refusal;
    if (!choice.asked(row) || row.takes(problem, context, &refusal)) continue;
    reasons += text(reasons.empty() ? "" : "; ", row.name, ": ", refusal.why);
    problem_helps |= !refusal.of_place;
  }
  check(!choice.rows.empty(), op,
        ": this device has no kernels for it; move the tensors to one that has, such as the CPU");
  check(!reasons.empty(), op, ": QUIRE_KERNEL names kernel '", choice.forced, "', which does not exist; use one of ",
        row_names(choice.rows));
  fail(op, ": no kernel takes ", to_string(problem), " (", reasons, "); ",
       !choice.forced.empty() ? "unset QUIRE_KERNEL"
       : problem_helps        ? "change the problem"
                              : "move the tensors to a device that has a kernel for them, such as the CPU");
}

/// The first row that takes the problem, or the one that is forced. Throws Error, beginning with `op`, if there is
/// none.
template <class Problem>
const KernelRow<Problem>& choose(std::string_view op, const Choice<Problem>& choice, const Problem& problem,
                                 const Context& context) {
  for (const auto& row : choice.rows)
    if (choice.asked(row) && row.takes(problem, context)) return row;
  refuse(op, choice, problem, context);
}

/// One line per row: its name, and "runs", the row before it that runs, or the reason why it cannot.
template <class Problem>
std::string explain_rows(const Choice<Problem>& choice, const Problem& problem, const Context& context) {
  std::string out;
  std::string_view running;
  for (const auto& row : choice.rows) {
    Refusal verdict;
    if (!choice.asked(row)) {
      verdict.why = "QUIRE_KERNEL names another";
    } else if (row.takes(problem, context, &verdict)) {
      verdict.why = running.empty() ? "runs" : text("not asked, ", running, " comes first");
      if (running.empty()) running = row.name;
    }
    out += text(row.name, ": ", verdict.why, "\n");
  }
  return out;
}

}  // namespace quire
