#include "quire/spec/moe_problem.h"

#include "quire/base/check.h"

namespace quire {
namespace {

std::string sizes(const Matrix& m) { return text(name(m.dtype), " [", m.rows, ", ", m.cols, "]"); }
std::string sizes(const RowMap& m) { return text(m.tokens, " tokens in ", m.slots, " slots"); }

}  // namespace

std::string to_string(const RouteProblem& p) { return text("route ", p.routing.to_string(), " ", sizes(p.logits)); }
std::string to_string(const RouteGradProblem& p) {
  return text("gradient of route ", p.routing.to_string(), " ", sizes(p.logits));
}
std::string to_string(const CapacityProblem& p) {
  return text("limit_capacity of ", p.count, " places among ", p.num_experts, " experts to ", p.capacity);
}
std::string to_string(const PermuteProblem& p) {
  return text("permute ", sizes(p.from), " to ", sizes(p.to), ", ", sizes(p.map), p.weights ? ", weighted" : "");
}
std::string to_string(const UnpermuteProblem& p) {
  return text("unpermute ", sizes(p.from), " to ", sizes(p.to), ", ", sizes(p.map), p.weights ? ", weighted" : "");
}
std::string to_string(const PermutedDotProblem& p) {
  return text("dot products of ", sizes(p.permuted), " and ", sizes(p.tokens), ", ", sizes(p.map));
}
std::string to_string(const ExpertRowsProblem& p) {
  return text("expert_rows of ", p.count, " places among ", p.num_experts, " experts");
}
std::string to_string(const ChunkRowsProblem& p) {
  return text("chunk_rows of ", p.rows, " rows in ", p.sizes.count, " chunks aligned to ", p.align);
}

}  // namespace quire
