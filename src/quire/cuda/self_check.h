// The self-check of rows: before a row first takes a kind of problem on a device, it solves a small one of that kind
// beside the reference row. A row that disagrees refuses such problems from then on, and says so.
#pragma once

#include <array>
#include <string_view>

#include "quire/base/kernel_table.h"
#include "quire/cuda/rows.h"
#include "quire/cuda/trial.h"
#include "quire/device/warning.h"

namespace quire::cuda {

/// Turns checks on or off for the whole process, and returns what was before. They are on unless QUIRE_SELF_CHECK=off.
bool set_self_check(bool on);

namespace detail {

/// One row, one kind of problem and one device, as a number.
struct Question {
  Question(const void* row, uint64_t kind, const Context& context);
  uint64_t key;
};

/// What is known of a question.
struct Verdict {
  bool known = false;
  uint32_t differing = 0;  ///< results that are not those of the reference
};
Verdict verdict_of(Question question);
/// Whether the question may be asked now: nobody captures the stream, and there is memory to solve problems in.
bool may_ask(const Context& context);
/// Keeps the first answer. Returns whether this is the one.
bool keep(Question question, uint32_t differing);
/// A row that is wrong on a device is named once, whatever else it gets wrong.
template <class Problem>
void warn_of(const KernelRow<Problem>& row, const Problem& problem, const Context& context) {
  if (keep(Question(&row, ~uint64_t{0}, context), 0))
    warn(text("quire: kernel '", row.name, "' of ", Problem::kOp, " failed its self-check on ", context.device->name,
              ":", context.index, ": results of a small problem like ", to_string(problem),
              " were not those of the reference. It is not used for such problems; please report it"));
}

/// Of a product's outputs, relative to the sum of the magnitudes of their terms: more than the bound of any row
/// (numerics.md 7.5), and less than one wrong term makes of a small problem.
inline constexpr float kTolerance = 0x1p-10f;

/// A small problem of that kind, and the memory that it lies in.
template <class Problem>
struct Solved {
  Solved(const Problem& like, const Trial::Terms& terms) : trial(terms), problem(small_like(like, trial)) {}
  Trial trial;
  Problem problem;
};

/// Results of a row that are not the reference's. A row that cannot be launched has none.
template <class Problem>
uint32_t differing(const KernelRow<Problem>& row, const KernelRow<Problem>& reference, const Problem& like,
                   const Solved<Problem>& found) {
  const Trial::Terms& terms = found.trial.terms;
  const Context& context = terms.context;
  try {
    row.run(found.problem, context);
  } catch (const Error&) {
    return ~uint32_t{0};
  }
  const Solved<Problem> expected(like, terms);
  reference.run(expected.problem, context);
  if constexpr (!kIsProduct<Problem>) {
    return found.trial.differing(expected.trial, nullptr, 0);
  } else {
    const Solved<Problem> magnitudes(like, {context, Wanted::magnitude, terms.large});
    reference.run(magnitudes.problem, context);
    return found.trial.differing(expected.trial, &magnitudes.trial, kTolerance);
  }
}

template <class Problem>
void ask(Question question, const KernelRow<Problem>& row, const KernelRow<Problem>& reference, const Problem& like,
         const Context& given) {
  Context context = given;
  context.observer = nullptr;
  for (const bool large : {false, true}) {
    const Solved<Problem> found(like, {context, Wanted::result, large});
    if (!row.takes(found.problem, context)) continue;
    const uint32_t wrong = differing(row, reference, like, found);
    if (keep(question, wrong) && wrong) warn_of(row, like, given);
    return;
  }
  keep(question, 0);  // it takes no small problem, so that nothing speaks against it
}

/// The same. Memory for a question may be short where the call itself has enough: the row then runs unchecked, and the
/// next call asks again.
template <class Problem>
void try_to_ask(Question question, const KernelRow<Problem>& row, const KernelRow<Problem>& reference,
                const Problem& like, const Context& given) {
  try {
    ask(question, row, reference, like, given);
  } catch (const Error&) {
    throw;
  } catch (const std::exception&) {  // of whoever lends the memory
  }
}

template <class Problem>
bool distrusts(const KernelRow<Problem>& row, const KernelRow<Problem>& reference, const Problem& p,
               const Context& context, Refusal* refusal) {
  const Question question(&row, kind_of(p, context), context);
  Verdict verdict = verdict_of(question);
  // Whoever wants words asks what would run, and computes nothing.
  if (!verdict.known && !refusal && may_ask(context)) {
    try_to_ask(question, row, reference, p, context);
    verdict = verdict_of(question);
  }
  return verdict.differing > 0 && refused_here(refusal, "its self-check failed on this device: ", verdict.differing,
                                               " results of a small problem were not those of ", reference.name,
                                               "; QUIRE_SELF_CHECK=off uses it all the same");
}

template <class Problem>
Problem problem_of(const KernelRow<Problem>&);

template <const auto& kRows, size_t kIndex>
struct Checked {
  using Problem = decltype(problem_of(kRows[kIndex]));

  static bool refuses(const Problem& p, const Context& context, Refusal* refusal) {
    return !kRows[kIndex].takes(p, context, refusal) || distrusts(kRows[kIndex], kRows.back(), p, context, refusal);
  }
};

/// PyTorch's products are PyTorch's to check: their precision is what its user has chosen.
inline bool is_checked(std::string_view row) { return row != "reference" && row != "library"; }

}  // namespace detail

/// The rows of a table that ends with its reference, with refusals of those that disagree with it.
template <const auto& kRows>
auto checked_rows() {
  auto rows = kRows;
  if constexpr (std::tuple_size_v<std::remove_cvref_t<decltype(kRows)>> > 1) {
    [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
      ((detail::is_checked(rows[kIndex].name) ? void(rows[kIndex].refuses = detail::Checked<kRows, kIndex>::refuses)
                                              : void()),
       ...);
    }(std::make_index_sequence<rows.size()>());
  }
  return rows;
}

}  // namespace quire::cuda
