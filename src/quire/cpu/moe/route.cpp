#include <algorithm>
#include <vector>

#include "quire/base/fault.h"
#include "quire/base/parallel.h"
#include "quire/cpu/moe/moe.h"
#include "quire/spec/router.h"
#include "quire/spec/row_map.h"

namespace quire::cpu {
namespace {

/// Logits that are worth a thread.
constexpr int64_t kGrain = 1 << 13;

/// Calls run(worker, token), each thread with a Worker whose memory is used again.
template <class Worker, class Problem, class Run>
void for_each_token(const Problem& p, const Run& run) {
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, p.logits.cols));
  parallel_for(p.logits.rows, grain, [&](int64_t begin, int64_t end) {
    std::vector<float> memory(static_cast<size_t>(Worker::bytes(p)) / sizeof(float));
    Worker worker(p, memory.data());
    for (int64_t token = begin; token < end; ++token) run(worker, token);
  });
}

}  // namespace

void check_expert_id(const char* op, int32_t id, int64_t place, int64_t num_experts) {
  if (!is_number_or_none(id, num_experts)) [[unlikely]]
    raise(op, ValueRule::expert_id, {.index = place, .value = id, .limit = num_experts});
}

void route(const RouteProblem& p, const Context&) {
  for_each_token<Router>(p, [](const Router& router, int64_t token) { router.route(token); });
}

void route_grad(const RouteGradProblem& p, const Context&) {
  for_each_token<RouterGrad>(p, [&](RouterGrad& router, int64_t token) {
    for (int64_t place = token * p.routing.topk; place < (token + 1) * p.routing.topk; ++place) {
      check_expert_id("route_bwd", p.ids[place], place, p.logits.cols);
      if (p.ids[place] < 0) raise("route_bwd", ValueRule::chosen_expert, {.index = place, .value = p.ids[place]});
    }
    router.run(token);
  });
}

void limit_capacity(const CapacityProblem& p, const Context&) {
  std::vector<int64_t> load(static_cast<size_t>(p.num_experts));
  for (int64_t i = 0; i < p.count; ++i) {
    const int32_t id = p.ids[i];
    check_expert_id("limit_capacity", id, i, p.num_experts);
    p.kept[i] = id >= 0 && load[static_cast<size_t>(id)]++ < p.capacity ? id : -1;
  }
}

}  // namespace quire::cpu
