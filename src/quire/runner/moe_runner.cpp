#include "quire/runner/moe_runner.h"

#include <utility>

#include "quire/base/check.h"
#include "quire/base/parallel.h"
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

}  // namespace

struct MoeRunner::Call {
  Matrix x;
  Choices choices;
  Assignment assignment;
  MutableMatrix results;  ///< [assignment.rows, H], in x's dtype
};

MoeRunner::MoeRunner(std::vector<Expert> experts, const MoeOptions& options)
    : Runner(info_of(experts, options)), experts_(std::move(experts)), options_(options) {
  check_activation_spec(options_.x);
  for (size_t i = 0; i < experts_.size(); ++i) check_expert(experts_[i], experts_.front(), options_.activation, i);
}

void MoeRunner::run(const RunnerCall& call) {
  const HeldArena arena;
  const Choices choices{call.expert_ids, call.expert_weights, call.x.rows, call.top_k};
  const Assignment a = assign(choices, info().experts, *arena);
  const Call c{.x = call.x,
               .choices = choices,
               .assignment = a,
               .results = arena->take_matrix(call.x.dtype, a.rows, info().out_features)};
  run_experts(c);
  combine(c.results, choices, a.row, !options_.weight_on_input, call.out);
}

void MoeRunner::run_experts(const Call& call) const {
  constexpr int64_t kWeights = 8;  // rows that cost as much as reading the weights once
  std::vector<int64_t> experts, costs;
  for (int64_t e = 0; e < info().experts; ++e)
    if (const int64_t rows = call.assignment.rows_of(e); rows > 0) {
      experts.push_back(e);
      costs.push_back(rows + kWeights);
    }
  parallel_tasks(costs, [&](size_t i) { run_expert(call, experts[i]); });
}

void MoeRunner::run_expert(const Call& call, int64_t expert) const {
  const HeldArena arena;
  const auto& [w13, w2] = experts_[static_cast<size_t>(expert)];
  const int64_t first = call.assignment.first[expert], rows = call.assignment.rows_of(expert);
  const DType dtype = call.x.dtype;

  const MutableMatrix x = arena->take_matrix(dtype, rows, w13.in_features());
  gather(call.x, call.choices, call.assignment.choice + first, options_.weight_on_input, x);
  const MutableMatrix h = arena->take_matrix(dtype, rows, w13.out_features());
  w13.multiply(quantize_rowwise(x, options_.x, *arena), h);

  const MutableMatrix act = arena->take_matrix(dtype, rows, w2.in_features());
  const Side codes = arena->take_rowwise(options_.x, rows, w2.in_features());
  activation({.activation = options_.activation, .x = h, .out = {.y = act, .spec = options_.x, .rowwise = codes}});
  const MutableMatrix out{static_cast<char*>(call.results.data) + first * call.results.cols * size_of(dtype), dtype,
                          rows, call.results.cols, call.results.cols};
  w2.multiply({.spec = options_.x,
               .direction = Direction::rowwise,
               .outer = rows,
               .contraction = w2.in_features(),
               .data = codes.data,
               .scale = codes.scale,
               .amax = codes.amax},
              out);
}

}  // namespace quire
