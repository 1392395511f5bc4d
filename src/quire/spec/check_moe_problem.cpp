// The rules of problems of mixtures of experts: what can be known without following their pointers.
#include "quire/base/check.h"
#include "quire/spec/check_problem.h"

namespace quire {
namespace {

void check_map(std::string_view op, const RowMap& map) {
  check_sizes(op, "row_map", map.tokens, map.slots);
  check_memory(op, "row_map", map.rows, map.tokens * map.slots);
}

/// Two matrices of the same dtype and columns, between which rows move.
void check_alike(std::string_view op, const Matrix& from, const Matrix& to) {
  check(from.dtype == to.dtype && from.cols == to.cols, op, ": from and to must have the same dtype and columns; got ",
        name(from.dtype), " [", from.rows, ", ", from.cols, "] and ", name(to.dtype), " [", to.rows, ", ", to.cols,
        "]; convert or reshape one");
}

/// Throws unless a matrix has a row for each token of the map.
void check_tokens(std::string_view op, std::string_view what, const Matrix& m, const RowMap& map) {
  check(m.rows == map.tokens, op, ": ", what, " must have a row for each of the ", map.tokens,
        " tokens of row_map, got ", m.rows, "; pass a map of the same tokens");
}

void check_groups_of_experts(const Routing& r, int64_t num_experts) {
  check(num_experts % r.num_groups == 0, "route: num_groups must divide the number of experts, ", num_experts, ", got ",
        r.num_groups);
  const int64_t size = num_experts / r.num_groups;
  check(r.group_best <= size, "route: group_best must not exceed the experts of a group, ", size, ", got ",
        r.group_best);
  check(r.topk <= r.group_topk * size, "route: topk must not exceed the experts of group_topk groups, ", r.group_topk,
        " * ", size, ", got ", r.topk);
}

/// Logits and what is chosen of them.
void check_routing(std::string_view op, const Routing& routing, const Matrix& logits) {
  check_matrix(op, "logits", logits);
  routing.check_experts(logits.cols);
  check_sizes(op, "ids", logits.rows, routing.topk);
}

}  // namespace

void Routing::check_experts(int64_t num_experts) const {
  check(topk >= 1 && topk <= num_experts, "route: topk must be from 1 to the number of experts, ", num_experts,
        ", got ", topk);
  if (num_groups != 0) check_groups_of_experts(*this, num_experts);
}

void check_problem(const RouteProblem& p) {
  check_routing(p.kOp, p.routing, p.logits);
  check_memory(p.kOp, "weights", p.weights, p.logits.rows * p.routing.topk);
  check_memory(p.kOp, "ids", p.ids, p.logits.rows * p.routing.topk);
}

void check_problem(const RouteGradProblem& p) {
  check_routing(p.kOp, p.routing, p.logits);
  check_memory(p.kOp, "dweights", p.dweights, p.logits.rows * p.routing.topk);
  check_memory(p.kOp, "ids", p.ids, p.logits.rows * p.routing.topk);
  check_matrix(p.kOp, "dlogits", p.dlogits);
  check_shape(p.kOp, "dlogits", p.dlogits, p.logits.rows, p.logits.cols);
}

void check_problem(const CapacityProblem& p) {
  check(p.capacity >= 0, "route (limit_capacity): capacity must not be negative, got ", p.capacity,
        "; pass None to keep every entry");
  constexpr int64_t kMost = int64_t{1} << 20;  // loads are counted in memory that is taken at once
  check(p.num_experts >= 1 && p.num_experts <= kMost, "route (limit_capacity): num_experts must be from 1 to ", kMost,
        ", got ", p.num_experts, "; pass the number of experts that topk_ids chooses from");
  check_memory(p.kOp, "topk_ids", p.ids, p.count);
  check_memory(p.kOp, "kept", p.kept, p.count);
}

void check_problem(const PermuteProblem& p) {
  check_map(p.kOp, p.map);
  check_extent(p.kOp, "from", p.from);
  check_extent(p.kOp, "to", p.to);
  check(p.to.rows <= kMostRows, p.kOp, ": rows must be fewer than 2^31, got ", p.to.rows, "; use fewer tokens");
  check_alike(p.kOp, p.from, p.to);
  check_tokens(p.kOp, "from", p.from, p.map);
  if (p.weights != nullptr) check_matrix(p.kOp, "from, which has weights,", p.from);
}

void check_problem(const UnpermuteProblem& p) {
  check_map("unpermute", p.map);
  check_matrix("unpermute", "from", p.from);
  check_matrix("unpermute", "to", p.to);
  check_alike("unpermute", p.from, p.to);
  check_tokens("unpermute", "to", p.to, p.map);
}

void check_problem(const PermutedDotProblem& p) {
  check_map("unpermute_dot", p.map);
  check_matrix("unpermute_dot", "permuted", p.permuted);
  check_matrix("unpermute_dot", "tokens", p.tokens);
  check_tokens("unpermute_dot", "tokens", p.tokens, p.map);
  check_shape("unpermute_dot", "permuted", p.permuted, p.permuted.rows, p.tokens.cols);
  check_memory("unpermute_dot", "to", p.to, p.map.tokens * p.map.slots);
}

void check_problem(const ExpertRowsProblem& p) {
  check(p.count <= kMostRows, "expert_rows: topk_ids must have fewer than 2^31 elements, got ", p.count,
        "; use fewer tokens");
  check_memory(p.kOp, "topk_ids", p.ids, p.count);
  check_memory(p.kOp, "row_map", p.row_map, p.count);
  check_memory(p.kOp, "offsets", p.offsets, p.num_experts);
}

void check_problem(const ChunkRowsProblem& p) {
  check(p.align > 0 && p.align <= kMostRows, "chunk_rows: align must be positive and less than 2^31, got ", p.align);
  check(p.order.count == 0 || p.order.count == p.sizes.count, "chunk_rows: order must have one number per chunk, ",
        p.sizes.count, ", got ", p.order.count);
  check_memory(p.kOp, "sizes", p.sizes.data, p.sizes.count);
  check_memory(p.kOp, "row_map", p.row_map, p.rows);
}

}  // namespace quire
