#include "quire/spec/pointwise_problem.h"

#include "quire/base/check.h"

namespace quire {
namespace {

std::string to_string(const Matrix& m) { return text(name(m.dtype), " [", m.rows, ", ", m.cols, "]"); }

/// " in 4 groups", or nothing.
std::string in(const RowGroups& g) { return is_one(g) ? "" : text(" in ", g.count, " groups"); }

std::string to_string(const Destination& to) {
  const bool quantized = to.rowwise.data || to.columnwise.data;
  return text(" to ", name(to.y.dtype), quantized ? " and " + to.spec.to_string() : "",
              to.rowwise.data ? " rowwise" : "", to.columnwise.data ? " columnwise" : "");
}

}  // namespace

std::string to_string(const NormProblem& p) { return text(name(p.kind), " ", to_string(p.x), to_string(p.out)); }

std::string to_string(const NormGradProblem& p) { return text("gradient of ", name(p.kind), " ", to_string(p.x)); }

std::string to_string(const ActivationProblem& p) {
  return text(p.activation.to_string(), " ", to_string(p.x), in(p.groups), to_string(p.out));
}

std::string to_string(const ActivationGradProblem& p) {
  return text("gradient of ", p.activation.to_string(), " ", to_string(p.x), in(p.groups));
}

}  // namespace quire
