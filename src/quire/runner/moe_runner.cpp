#include "quire/runner/moe_runner.h"

#include <span>
#include <utility>

#include "quire/base/check.h"
#include "quire/base/parallel.h"
#include "quire/moe/permute.h"
#include "quire/moe/row_map.h"
#include "quire/pointwise/pointwise.h"
#include "quire/runner/linear_runner.h"

namespace quire {
namespace {

RunnerInfo info_of(const std::vector<Expert>& experts, const MoeOptions& o) {
  check(!experts.empty(), "runner: a mixture needs at least 1 expert, got none; pass their weights");
  const Expert& e = experts.front();
  return {.kind = RunnerKind::moe,
          .in_features = e.w13.in_features(),
          .out_features = e.w2.out_features(),
          .experts = static_cast<int64_t>(experts.size()),
          .description = text("x=", o.x.to_string(), ",w=", e.w13.spec().to_string(), " ", o.activation.to_string(),
                              o.weight_on_input ? ", weights on input" : "")};
}

void check_expert(const Expert& e, const Expert& first, const Activation& f, size_t number) {
  const PreparedWeight &w13 = e.w13, &w2 = e.w2;
  check(w13.out_features() == f.inputs() * w2.in_features() && w2.out_features() == w13.in_features(),
        "runner: an expert's weights must be w13 [", f.inputs(), " * I, H] and w2 [H, I] for ", f.to_string(),
        "; got [", w13.out_features(), ", ", w13.in_features(), "] and [", w2.out_features(), ", ", w2.in_features(),
        "] for expert ", number);
  check(w13.out_features() == first.w13.out_features() && w13.in_features() == first.w13.in_features(),
        "runner: all experts must have the same sizes; w13 of expert ", number, " is [", w13.out_features(), ", ",
        w13.in_features(), "] and that of expert 0 [", first.w13.out_features(), ", ", first.w13.in_features(), "]");
}

/// `count` rows from `first` on.
MutableMatrix rows_of(const MutableMatrix& m, int64_t first, int64_t count) {
  char* data = static_cast<char*>(m.data) + first * m.row_stride * size_of(m.dtype);
  return {data, m.dtype, count, m.cols, m.row_stride};
}

}  // namespace

MoeRunner::MoeRunner(std::vector<Expert> experts, const MoeOptions& options)
    : Runner(info_of(experts, options)), experts_(std::move(experts)), options_(options) {
  check_activation_spec(options_.x);
  for (size_t i = 0; i < experts_.size(); ++i) check_expert(experts_[i], experts_.front(), options_.activation, i);
}

void MoeRunner::run(const RunnerCall& call) {
  constexpr int64_t kWeights = 8;  // rows that cost as much as reading an expert's weights once
  const HeldArena arena;
  const int64_t choices = call.x.rows * call.top_k;
  int32_t* const rows_of_choices = arena->take<int32_t>(choices);
  const std::span ends(arena->take<int32_t>(info().experts), experts_.size());
  expert_rows({.ids = {call.expert_ids, static_cast<size_t>(choices)}, .row_map = rows_of_choices, .offsets = ends});
  const RowMap map{.rows = rows_of_choices, .tokens = call.x.rows, .slots = call.top_k};
  const MutableMatrix x = arena->take_matrix(call.x.dtype, ends.back(), call.x.cols);
  const MutableMatrix results = arena->take_matrix(call.x.dtype, ends.back(), call.out.cols);
  const bool on_input = options_.weight_on_input;
  permute({.from = call.x, .map = map, .weights = on_input ? call.expert_weights : nullptr, .to = x});

  const std::span costs(arena->take<int64_t>(info().experts), experts_.size());
  for (size_t e = 0; e < costs.size(); ++e) {
    const int64_t rows = ends[e] - (e > 0 ? ends[e - 1] : 0);
    costs[e] = rows > 0 ? rows + kWeights : 0;
  }
  parallel_tasks(costs, [&](size_t e) {
    const int64_t first = e > 0 ? ends[e - 1] : 0, rows = ends[e] - first;
    if (rows > 0) run_expert(experts_[e], rows_of(x, first, rows), rows_of(results, first, rows));
  });
  unpermute({.from = results, .map = map, .weights = on_input ? nullptr : call.expert_weights, .to = call.out});
}

void MoeRunner::run_expert(const Expert& expert, const Matrix& x, const MutableMatrix& out) const {
  const HeldArena arena;
  const MutableMatrix h = arena->take_matrix(x.dtype, x.rows, expert.w13.out_features());
  expert.w13.multiply(quantize_rowwise(x, options_.x, *arena), h);

  const int64_t inner = expert.w2.in_features();
  const MutableMatrix act = arena->take_matrix(x.dtype, x.rows, inner);
  const Side codes = arena->take_rowwise(options_.x, x.rows, inner);
  activation({.activation = options_.activation, .x = h, .out = {.y = act, .spec = options_.x, .rowwise = codes}});
  expert.w2.multiply(rowwise_operand(codes, options_.x, x.rows, inner), out);
}

}  // namespace quire
