// The rules of problems of mixtures of experts: what can be known without following their pointers.
#include "quire/base/check.h"
#include "quire/spec/check_problem.h"

namespace quire {
namespace {

void check_map(std::string_view op, const RowMap& map) {
  int64_t places = 0;
  check(map.tokens >= 0 && map.slots >= 0 && !__builtin_mul_overflow(map.tokens, map.slots, &places), op,
        ": row_map must be [tokens, slots]; got [", map.tokens, ", ", map.slots, "]; correct its sizes");
  check_memory(op, "row_map", map.rows, places);
}

}  // namespace

void check_problem(const RouteProblem& p) {
  p.routing.check_experts(p.logits.cols);
  check_memory(p.kOp, "logits", p.logits.data, p.logits.rows * p.logits.cols);
  check_memory(p.kOp, "weights", p.weights, p.logits.rows * p.routing.topk);
  check_memory(p.kOp, "ids", p.ids, p.logits.rows * p.routing.topk);
}

void check_problem(const RouteGradProblem& p) {
  p.routing.check_experts(p.logits.cols);
  check_memory(p.kOp, "logits", p.logits.data, p.logits.rows * p.logits.cols);
  check_memory(p.kOp, "dweights", p.dweights, p.logits.rows * p.routing.topk);
  check_memory(p.kOp, "ids", p.ids, p.logits.rows * p.routing.topk);
}

void check_problem(const CapacityProblem& p) {
  check(p.capacity >= 0, "route (limit_capacity): capacity must not be negative, got ", p.capacity,
        "; pass None to keep every entry");
  check_memory(p.kOp, "topk_ids", p.ids, p.count);
  check_memory(p.kOp, "kept", p.kept, p.count);
}

void check_problem(const PermuteProblem& p) {
  check_map(p.kOp, p.map);
  check_memory(p.kOp, "from", p.from.data, p.from.rows * p.from.cols);
  check_memory(p.kOp, "to", p.to.data, p.to.rows * p.to.cols);
}

void check_problem(const UnpermuteProblem& p) {
  check_map("unpermute", p.map);
  check_memory("unpermute", "from", p.from.data, p.from.rows * p.from.cols);
  check_memory("unpermute", "to", p.to.data, p.to.rows * p.to.cols);
}

void check_problem(const PermutedDotProblem& p) {
  check_map("unpermute_dot", p.map);
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
