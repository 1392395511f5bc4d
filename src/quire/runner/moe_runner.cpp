#include "quire/runner/moe_runner.h"

#include <utility>

#include "quire/base/check.h"
#include "quire/operations/operations.h"

namespace quire {
namespace {

RunnerInfo info_of(const Experts& e, const MoeOptions& o, bool shared) {
  return {.kind = RunnerKind::moe,
          .device = e.w13.place(),
          .in_features = e.w13.in_features(),
          .out_features = e.w2.out_features(),
          .experts = e.w13.count(),
          .description = text("x=", o.x.to_string(), ",w=", e.w13.spec().to_string(), " ", o.activation.to_string(),
                              o.weight_on_input ? ", weights on input" : "", shared ? ", shared expert" : "")};
}

void check_experts(const Experts& e, const MoeOptions& o, const char* which) {
  const PreparedWeight &w13 = e.w13, &w2 = e.w2;
  const Activation& f = o.activation;
  check(w13.out_features() == f.inputs() * w2.in_features() && w2.out_features() == w13.in_features(),
        "runner: an expert's weights must be w13 [", f.inputs(), " * I, H] and w2 [H, I] for ", f.to_string(),
        "; got [", w13.out_features(), ", ", w13.in_features(), "] and [", w2.out_features(), ", ", w2.in_features(),
        "] for ", which);
  check(w13.count() == w2.count(), "runner: w13 and w2 must have as many experts, got ", w13.count(), " and ",
        w2.count(), " for ", which);
  check(w13.place() == w2.place(), "runner: w13 and w2 must be on one device; got ", w13.place(), " and ", w2.place(),
        " for ", which, "; move one");
  w13.check_input_spec(o.x);
  w2.check_input_spec(o.x);
}

/// Every second row of a matrix of twice as many, the first or the second of each two.
MutableMatrix half_of(const MutableMatrix& both, int64_t which) {
  return {static_cast<char*>(both.data) + which * both.cols * size_of(both.dtype), both.dtype, both.rows / 2, both.cols,
          2 * both.cols};
}

int64_t bytes_of(DType dtype, int64_t rows, int64_t cols) { return times(times(rows, cols), size_of(dtype)); }
int64_t bytes_of_ints(int64_t count) { return times(count, int64_t{sizeof(int32_t)}); }

}  // namespace

/// Rows that go through networks, and the memory that is theirs.
struct MoeRunner::Rows {
  Matrix x;
  MutableMatrix out;
  RowGroups groups;
  int64_t divided = 0;  ///< into how many groups by ends; 0: they are one
  const CallMemory* memory = nullptr;
};

/// What lies between x and out.
struct MoeRunner::Planned {
  std::optional<PlannedCodes> x, act;
  int64_t h;  ///< the activation's input, of whose columns its result takes the first
};

MoeRunner::MoeRunner(Experts experts, const MoeOptions& options, std::optional<Experts> shared)
    : Runner(info_of(experts, options, shared.has_value())),
      experts_(std::move(experts)),
      shared_(std::move(shared)),
      options_(options) {
  check_experts(experts_, options_, "the experts");
  if (!shared_) return;
  check_experts(*shared_, options_, "the shared expert");
  check(shared_->w13.count() == 1, "runner: there is one shared expert, got ", shared_->w13.count());
  check(shared_->w13.in_features() == info().in_features, "runner: the shared expert must have the experts' H, ",
        info().in_features, "; got ", shared_->w13.in_features());
  check(shared_->w13.place() == info().device, "runner: the shared expert must be on the experts' device, ",
        info().device, "; got ", shared_->w13.place(), "; move it");
}

void MoeRunner::run(const RunnerCall& call) {
  if (call.context.batch_invariant) check_tokens_alone();
  const int64_t tokens = call.x.rows, choices = times(tokens, call.top_k), count = info().experts;
  const DType dtype = call.x.dtype;
  Context context = call.context;
  CallMemory memory;
  Rows rows{.x = {nullptr, dtype, choices, call.x.cols, call.x.cols},
            .out = {nullptr, dtype, choices, call.out.cols, call.out.cols},
            .groups = {.count = count, .rows = choices, .what = "nvfp4_moe"},
            .divided = count,
            .memory = &memory};
  Rows all{.x = call.x, .out = call.out, .groups = {.rows = tokens}, .memory = &memory};
  const int64_t map_at = memory.plan(bytes_of_ints(choices)), ends_at = memory.plan(bytes_of_ints(count)),
                x_at = memory.plan(bytes_of(dtype, choices, call.x.cols)),
                out_at = memory.plan(bytes_of(dtype, choices, call.out.cols));
  const Planned planned = plan(memory, experts_, rows);
  const std::optional<Planned> planned_shared = shared_ ? std::optional(plan(memory, *shared_, all)) : std::nullopt;
  const int64_t both_at = memory.plan(shared_ ? bytes_of(dtype, 2 * tokens, call.out.cols) : 0),
                pairs_at = memory.plan(shared_ ? bytes_of_ints(2 * tokens) : 0);
  memory.lend(context);

  const RowMap map{.rows = memory.at<int32_t>(map_at), .tokens = tokens, .slots = call.top_k};
  expert_rows({.ids = call.expert_ids,
               .count = choices,
               .row_map = memory.at<int32_t>(map_at),
               .offsets = memory.at<int32_t>(ends_at),
               .num_experts = count},
              context);
  const MutableMatrix x = memory.matrix(x_at, dtype, choices, call.x.cols);
  const float *const weights = call.expert_weights, *const on_input = options_.weight_on_input ? weights : nullptr;
  permute({.from = call.x, .map = map, .weights = on_input, .to = x}, context);
  rows.x = x, rows.out.data = memory.at<void>(out_at);
  rows.groups.ends = {.data = memory.at<int32_t>(ends_at), .count = count};
  context.part = "expert";
  compute(experts_, rows, planned, context);
  const MutableMatrix both = memory.matrix(both_at, dtype, 2 * tokens, call.out.cols);
  unpermute({.from = rows.out,
             .map = map,
             .weights = on_input ? nullptr : weights,
             .to = shared_ ? half_of(both, 0) : call.out},
            context);
  if (!shared_) return;
  // The sum of two rows that follow one another, rounded once more.
  all.out = half_of(both, 1);
  context.part = "shared expert";
  compute(*shared_, all, *planned_shared, context);
  int32_t* const pairs = memory.at<int32_t>(pairs_at);
  chunk_rows({.sizes = {}, .row_map = pairs, .rows = 2 * tokens}, context);
  unpermute({.from = both, .map = {.rows = pairs, .tokens = tokens, .slots = 2}, .to = call.out}, context);
}

void MoeRunner::take(const Runner& other, const Storage& storage) {
  const auto* const from = dynamic_cast<const MoeRunner*>(&other);
  const auto described = [](const MoeRunner& m) {
    return text(m.options_.x.to_string(), m.options_.activation.to_string(), m.options_.weight_on_input,
                m.shared_.has_value());
  };
  check(from != nullptr && described(*from) == described(*this),
        "runner: a mixture takes the weights of another one with the same options; this is ", info().description,
        ", got ", other.info().description);
  experts_.w13.check_taken(from->experts_.w13, "w13");
  experts_.w2.check_taken(from->experts_.w2, "w2");
  if (shared_) {
    shared_->w13.check_taken(from->shared_->w13, "shared_w13");
    shared_->w2.check_taken(from->shared_->w2, "shared_w2");
    shared_->w13.take(from->shared_->w13, storage);
    shared_->w2.take(from->shared_->w2, storage);
  }
  experts_.w13.take(from->experts_.w13, storage);
  experts_.w2.take(from->experts_.w2, storage);
}

void MoeRunner::check_tokens_alone() const {
  const auto check = [this](const Experts& e) {
    e.w13.check_tokens_alone(options_.x);
    e.w2.check_tokens_alone(options_.x);
  };
  check(experts_);
  if (shared_) check(*shared_);
}

MoeRunner::Planned MoeRunner::plan(CallMemory& memory, const Experts& experts, const Rows& rows) const {
  const PreparedWeight &w13 = experts.w13, &w2 = experts.w2;
  const int64_t count = rows.groups.rows;
  Planned p;
  if (options_.x) {
    p.x.emplace(memory, *options_.x, std::array{count, w13.in_features()}, rows.divided);
    p.act.emplace(memory, *options_.x, std::array{count, w2.in_features()}, rows.divided);
  }
  p.h = memory.plan(bytes_of(rows.x.dtype, count, w13.out_features()));
  return p;
}

void MoeRunner::compute(const Experts& experts, const Rows& rows, const Planned& planned,
                        const Context& context) const {
  const PreparedWeight &w13 = experts.w13, &w2 = experts.w2;
  const CallMemory& memory = *rows.memory;
  const MutableMatrix h = memory.matrix(planned.h, rows.x.dtype, rows.groups.rows, w13.out_features());
  const MutableMatrix act{h.data, h.dtype, h.rows, w2.in_features(), h.row_stride};
  const Activation& f = options_.activation;
  if (!options_.x) {
    matmul(w13.plain_product(rows.x, rows.groups, h), context);
    activation({.activation = f, .x = h, .out = {.y = act}, .groups = rows.groups}, context);
    matmul(w2.plain_product(act, rows.groups, rows.out), context);
    return;
  }
  const QuantSpec& spec = *options_.x;
  const RowCodes x = planned.x->in(memory, rows.groups), a = planned.act->in(memory, rows.groups);
  quantize(w13.quantization(rows.x, spec, x), context);
  gemm(w13.product(x, spec, h, "w13"), context);
  activation({.activation = f,
              .x = h,
              .out = w2.destination(act, spec, a),
              .groups = rows.groups,
              .room = {.rowwise = a.room}},
             context);
  gemm(w2.product(a, spec, rows.out, "w2"), context);
}

}  // namespace quire
