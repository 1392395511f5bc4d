#include "quire/spec/state_problem.h"

#include "quire/base/check.h"

namespace quire {

std::string to_string(const FingerprintProblem& p) {
  return text(p.expected ? "comparison of the fingerprint of " : "fingerprint of ", name(p.x.dtype), " [", p.x.rows,
              ", ", p.x.cols, "]", is_one(p.groups) ? "" : text(" in ", p.groups.count, " groups"));
}
std::string to_string(const AdvanceProblem&) { return "advance of a counter"; }
std::string to_string(const MaximumProblem& p) { return text("maximum of ", p.count, " values"); }
std::string to_string(const CollectProblem& p) {
  return text("collection of ", p.count, " amaxes of x", p.of_w ? " and of w" : "");
}
std::string to_string(const DelayedUpdateProblem& p) {
  return text("delayed_update of ", p.states.size(), p.backward ? " backward" : " forward", " states");
}

}  // namespace quire
