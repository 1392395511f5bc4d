#include "quire/runner/moe_runner.h"

#include <algorithm>
#include <span>
#include <utility>

#include "quire/base/check.h"
#include "quire/base/parallel.h"
#include "quire/format/element.h"
#include "quire/gemm/gemm.h"
#include "quire/moe/moe.h"
#include "quire/pointwise/pointwise.h"
#include "quire/quantize/quantize.h"

namespace quire {
namespace {

RunnerInfo info_of(const std::vector<Expert>& experts, const MoeOptions& o, const std::optional<Expert>& shared) {
  check(!experts.empty(), "runner: a mixture needs at least 1 expert, got none; pass their weights");
  const Expert& e = experts.front();
  return {.kind = RunnerKind::moe,
          .in_features = e.w13.in_features(),
          .out_features = e.w2.out_features(),
          .experts = static_cast<int64_t>(experts.size()),
          .description = text("x=", o.x.to_string(), ",w=", e.w13.spec().to_string(), " ", o.activation.to_string(),
                              o.weight_on_input ? ", weights on input" : "", shared ? ", shared expert" : "")};
}

void check_expert(const Expert& e, const MoeOptions& o, const std::string& which) {
  const PreparedWeight &w13 = e.w13, &w2 = e.w2;
  const Activation& f = o.activation;
  check(w13.out_features() == f.inputs() * w2.in_features() && w2.out_features() == w13.in_features(),
        "runner: an expert's weights must be w13 [", f.inputs(), " * I, H] and w2 [H, I] for ", f.to_string(),
        "; got [", w13.out_features(), ", ", w13.in_features(), "] and [", w2.out_features(), ", ", w2.in_features(),
        "] for ", which);
  w13.check_input_spec(o.x);
  w2.check_input_spec(o.x);
}

/// `count` rows from `first` on.
MutableMatrix rows_of(const MutableMatrix& m, int64_t first, int64_t count) {
  char* data = static_cast<char*>(m.data) + first * m.row_stride * size_of(m.dtype);
  return {data, m.dtype, count, m.cols, m.row_stride};
}

/// to += more, rounded to the dtype of both.
void add(const Matrix& more, const MutableMatrix& to) {
  parallel_for(to.rows, std::max<int64_t>(1, (int64_t{1} << 14) / to.cols), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      for (int64_t c = 0; c < to.cols; ++c) {
        const int64_t at = r * to.row_stride + c;
        const float sum =
            load_element(to.data, to.dtype, at) + load_element(more.data, more.dtype, r * more.row_stride + c);
        store_element(to.data, to.dtype, at, sum);
      }
  });
}

}  // namespace

/// What one expert computes, and the memory that it has for it.
struct MoeRunner::Task {
  const Expert* expert;
  Matrix x;
  Side x_codes, act_codes;
  MutableMatrix h;  ///< the activation's input, of whose columns its result takes the first
  MutableMatrix out;

  MutableMatrix act() const { return {h.data, h.dtype, h.rows, expert->w2.in_features(), h.row_stride}; }
};

/// Where tokens go.
struct MoeRunner::Routes {
  RowMap map;
  std::span<const int32_t> ends;  ///< of each expert's rows
  int64_t choices;                ///< rows at most
};

MoeRunner::MoeRunner(std::vector<Expert> experts, const MoeOptions& options, std::optional<Expert> shared)
    : Runner(info_of(experts, options, shared)),
      experts_(std::move(experts)),
      shared_(std::move(shared)),
      options_(options) {
  const PreparedWeight& first = experts_.front().w13;
  for (size_t i = 0; i < experts_.size(); ++i) {
    const PreparedWeight& w13 = experts_[i].w13;
    check_expert(experts_[i], options_, text("expert ", i));
    check(w13.out_features() == first.out_features() && w13.in_features() == first.in_features(),
          "runner: all experts must have the same sizes; w13 of expert ", i, " is [", w13.out_features(), ", ",
          w13.in_features(), "] and that of expert 0 [", first.out_features(), ", ", first.in_features(), "]");
  }
  if (!shared_) return;
  check_expert(*shared_, options_, "the shared expert");
  check(shared_->w13.in_features() == first.in_features(), "runner: the shared expert must have the experts' H, ",
        first.in_features(), "; got ", shared_->w13.in_features());
}

void MoeRunner::run(const RunnerCall& call) {
  const HeldArena arena;
  const int64_t choices = call.x.rows * call.top_k;
  int32_t* const rows_of_choices = arena->take<int32_t>(choices);
  const std::span ends(arena->take<int32_t>(info().experts), experts_.size());
  expert_rows({.ids = call.expert_ids,
               .count = choices,
               .row_map = rows_of_choices,
               .offsets = ends.data(),
               .num_experts = info().experts});
  const RowMap map{.rows = rows_of_choices, .tokens = call.x.rows, .slots = call.top_k};
  const std::span<Task> all = tasks(call, {map, ends, choices}, *arena);
  run_all(call, all, *arena);
  const Matrix results = {all.front().out.data, call.x.dtype, ends.back(), call.out.cols, call.out.cols};
  unpermute({.from = results,
             .map = map,
             .weights = options_.weight_on_input ? nullptr : call.expert_weights,
             .to = call.out});
  if (shared_) add(all.back().out, call.out);
}

/// A task of each expert, the shared one last, with the rows of its tokens.
std::span<MoeRunner::Task> MoeRunner::tasks(const RunnerCall& call, const Routes& routes, Arena& arena) const {
  const PreparedWeight &w13 = experts_.front().w13, &w2 = experts_.front().w2;
  const DType dtype = call.x.dtype;
  const int64_t most = routes.choices, count = info().experts + (shared_ ? 1 : 0);
  const MutableMatrix x = arena.take_matrix(dtype, most, w13.in_features()),
                      h = arena.take_matrix(dtype, most, w13.out_features()),
                      out = arena.take_matrix(dtype, most, w2.out_features());
  const auto codes = [&](int64_t cols) {
    return options_.x ? arena.take_rowwise(*options_.x, routes.ends, most, cols) : std::span<Side>();
  };
  const std::span x_codes = codes(w13.in_features()), act_codes = codes(w2.in_features());
  Context context = host();
  context.workspace = &arena;
  permute({.from = call.x,
           .map = routes.map,
           .weights = options_.weight_on_input ? call.expert_weights : nullptr,
           .to = rows_of(x, 0, routes.ends.back())},
          context);
  const std::span tasks(arena.take<Task>(count), static_cast<size_t>(count));
  for (size_t e = 0; e < experts_.size(); ++e) {
    const int64_t first = e > 0 ? routes.ends[e - 1] : 0, rows = routes.ends[e] - first;
    tasks[e] = {.expert = &experts_[e],
                .x = rows_of(x, first, rows),
                .x_codes = options_.x ? x_codes[e] : Side{},
                .act_codes = options_.x ? act_codes[e] : Side{},
                .h = rows_of(h, first, rows),
                .out = rows_of(out, first, rows)};
  }
  if (shared_) tasks.back() = shared_task(call, arena);
  return tasks;
}

MoeRunner::Task MoeRunner::shared_task(const RunnerCall& call, Arena& arena) const {
  const PreparedWeight &w13 = shared_->w13, &w2 = shared_->w2;
  const int64_t rows = call.x.rows;
  const auto codes = [&](int64_t cols) { return options_.x ? arena.take_rowwise(*options_.x, rows, cols) : Side{}; };
  return {.expert = &*shared_,
          .x = call.x,
          .x_codes = codes(w13.in_features()),
          .act_codes = codes(w2.in_features()),
          .h = arena.take_matrix(call.x.dtype, rows, w13.out_features()),
          .out = arena.take_matrix(call.x.dtype, rows, w2.out_features())};
}

void MoeRunner::run_all(const RunnerCall& call, std::span<const Task> tasks, Arena& arena) const {
  if (call.observer || !options_.x) {
    Context context = host();
    context.observer = call.observer;
    for (const Task& task : tasks) run_task(task, context);
    return;
  }
  constexpr int64_t kWeights = 8;  // rows that cost as much as reading an expert's weights once
  const auto cost = [](const Task& t) { return t.x.rows > 0 ? (t.x.rows + kWeights) * t.h.cols : 0; };
  const std::span costs(arena.take<int64_t>(std::ssize(tasks)), tasks.size());
  std::transform(tasks.begin(), tasks.end(), costs.begin(), cost);
  parallel_tasks(costs, [&](size_t i) { run_task(tasks[i], host()); });
}

void MoeRunner::run_task(const Task& task, Context context) const {
  if (task.x.rows == 0) return;
  const auto& [w13, w2] = *task.expert;
  std::string part;
  if (context.observer) {
    part = shared_ && task.expert == &*shared_ ? "shared expert" : text("expert ", task.expert - experts_.data());
    context.part = part;
  }
  if (!options_.x) return run_unquantized(task, context);
  const QuantSpec& x = *options_.x;
  quantize(w13.quantization(task.x, x, task.x_codes), context);
  gemm(w13.product(task.x_codes, x, task.h, "w13"), context);
  activation({.activation = options_.activation, .x = task.h, .out = w2.destination(task.act(), x, task.act_codes)},
             context);
  gemm(w2.product(task.act_codes, x, task.out, "w2"), context);
}

void MoeRunner::run_unquantized(const Task& task, const Context& context) const {
  task.expert->w13.multiply(task.x, task.h, context);
  activation({.activation = options_.activation, .x = task.h, .out = {.y = task.act()}}, context);
  task.expert->w2.multiply(task.act(), task.out, context);
}

}  // namespace quire
