// Choice of a kernel: rows in order of preference, each able to say why it would not take a problem.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "quire/base/check.h"

namespace quire {

template <class Problem>
struct KernelRow {
  std::string_view name;
  /// Whether this row cannot take the problem. Says why in *why, unless that is null: every call asks, few want words.
  bool (*refuses)(const Problem&, std::string* why);
  void (*run)(const Problem&);
};

/// Nothing to refuse.
template <class Problem>
bool takes_all(const Problem&, std::string*) {
  return false;
}

/// For rows: refuses, for a reason made of these parts.
template <class... Parts>
bool refused(std::string* why, const Parts&... parts) {
  if (why) *why = text(parts...);
  return true;
}

/// The row that `setting` (the text of QUIRE_KERNEL: `op:NAME`, several separated by commas) forces for `op`; empty if
/// it forces none. Throws Error if the text is not of that form.
std::string_view forced_kernel(std::string_view setting, std::string_view op);

template <class Problem>
std::string row_names(std::span<const KernelRow<Problem>> rows) {
  std::string names;
  for (const auto& row : rows) names += (names.empty() ? "" : ", ") + std::string(row.name);
  return names;
}

/// The first row that takes the problem, or the row named `forced`. Throws Error if there is none.
template <class Problem>
const KernelRow<Problem>& choose(std::string_view op, std::span<const KernelRow<Problem>> rows, std::string_view forced,
                                 const Problem& problem) {
  const auto asked = [&](const auto& row) { return forced.empty() || row.name == forced; };
  for (const auto& row : rows)
    if (asked(row) && !row.refuses(problem, nullptr)) return row;
  std::string reasons;
  for (const auto& row : rows) {
    std::string why;
    if (asked(row) && row.refuses(problem, &why)) reasons += text(reasons.empty() ? "" : "; ", row.name, ": ", why);
  }
  check(!reasons.empty(), op, ": QUIRE_KERNEL names kernel '", forced, "', which does not exist; use one of ",
        row_names(rows));
  fail(op, ": no kernel takes ", to_string(problem), " (", reasons, "); ",
       forced.empty() ? "change the problem" : "unset QUIRE_KERNEL");
}

/// One line per row: its name, and "runs", the row before it that runs, or the reason why it cannot.
template <class Problem>
std::string explain_rows(std::span<const KernelRow<Problem>> rows, std::string_view forced, const Problem& problem) {
  std::string out;
  std::string_view running;
  for (const auto& row : rows) {
    std::string verdict;
    if (!forced.empty() && row.name != forced) {
      verdict = "QUIRE_KERNEL names another";
    } else if (!row.refuses(problem, &verdict)) {
      verdict = running.empty() ? "runs" : text("not asked, ", running, " comes first");
      if (running.empty()) running = row.name;
    }
    out += text(row.name, ": ", verdict, "\n");
  }
  return out;
}

}  // namespace quire
