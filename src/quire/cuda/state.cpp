#include "quire/cuda/kernels/state.h"
#include "quire/base/shape.h"
#include "quire/cuda/groups.h"
#include "quire/cuda/rows.h"

namespace quire::cuda {
namespace {

constinit const Kernel kSumWords{"state", "sum_words"};
constinit const Kernel kEndFingerprints{"state", "end_fingerprints"};
constinit const Kernel kAdvanceOne{"state", "advance"};
constinit const Kernel kMaximumOfEach{"state", "maximum"};
constinit const Kernel kCollectEach{"state", "collect"};
constinit const Kernel kPlanSteps{"state", "plan_steps"};
constinit const Kernel kEndSteps{"state", "end_steps"};

void fingerprint(const FingerprintProblem& p, const Context& context) {
  constexpr int64_t words = 8;  // of a thread
  const int64_t count = p.groups.count;
  const Matrix x{p.x.data, p.each.empty() ? p.x.dtype : p.each[0].dtype, p.x.rows, p.x.cols, p.x.row_stride};
  FingerprintJob job{.x = x,
                     .each = list_on_device(p.each, context),
                     .groups = place_groups(p.groups, x.rows, context),
                     .only = {},
                     .sums = lend<uint64_t>(context, count),
                     .to = p.to,
                     .expected = p.expected,
                     .site = fault_site(context, p.what)};
  if (p.only.ends.data) job.only = place_groups(p.only, p.only.rows, context);
  fill(job.sums, 0, count * static_cast<int64_t>(sizeof(uint64_t)), context);
  const int64_t threads = ceil_div(x.rows * ceil_div(x.cols * size_of(x.dtype), 8), words * count);
  if (threads > 0) launch(kSumWords, with_groups(grid_of(threads), count), job, context);
  launch(kEndFingerprints, grid_of(count), job, context);
}

void advance(const AdvanceProblem& p, const Context& context) { launch(kAdvanceOne, {}, p, context); }

void maximum(const MaximumProblem& p, const Context& context) {
  if (p.count > 0) launch(kMaximumOfEach, grid_of(p.count), p, context);
}

void delayed_collect(const CollectProblem& p, const Context& context) {
  launch(kCollectEach, grid_of(2 * p.count), p, context);
}

void delayed_update(const DelayedUpdateProblem& p, const Context& context) {
  const int64_t count = std::ssize(p.states);
  if (count == 0) return;
  int64_t slots = 1;
  for (const DelayedState& state : p.states) slots = std::max(slots, state.slots);
  const DelayedUpdateJob job{.states = list_on_device(p.states, context),
                             .count = count,
                             .rules = p.rules,
                             .rule_count = p.rule_count,
                             .backward = p.backward,
                             .plans = lend<StepPlan>(context, count),
                             .broken = lend<uint32_t>(context, 1),
                             .site = fault_site(context, "delayed_update_")};
  fill(job.broken, 0, sizeof(uint32_t), context);
  launch(kPlanSteps, grid_of(count), job, context);
  constexpr int64_t warp = 32, most_warps = 4, most_blocks = 64;
  const int64_t warps = std::min(slots, most_warps);
  Grid grid = grid_of(count, 1);
  grid.threads = static_cast<unsigned>(warps * warp);
  grid.blocks_y = static_cast<unsigned>(std::min(ceil_div(slots, warps), most_blocks));
  launch(kEndSteps, grid, job, context);
}

}  // namespace

constinit const Rows<FingerprintProblem> kFingerprint{{{"reference", nullptr, fingerprint}}};
constinit const Rows<AdvanceProblem> kAdvance{{{"reference", nullptr, advance}}};
constinit const Rows<MaximumProblem> kMaximum{{{"reference", nullptr, maximum}}};
constinit const Rows<CollectProblem> kCollect{{{"reference", nullptr, delayed_collect}}};
constinit const Rows<DelayedUpdateProblem> kDelayedUpdate{{{"reference", nullptr, delayed_update}}};

}  // namespace quire::cuda
