// Routing: a thread for each token, as spec/router.h has it; or a warp for each, whose numbers are in shared memory and
// in the lanes. Its arithmetic and the order of its sums are the same.
#include "quire/cuda/kernels/fault.cuh"
#include "quire/cuda/kernels/moe.h"
#include "quire/cuda/kernels/threads.cuh"
#include "quire/spec/router.h"

using namespace quire;
using namespace quire::cuda;

namespace {

/// This warp's part of shared memory.
__device__ float* shared_of_warp(int64_t bytes) {
  extern __shared__ float memory[];
  return memory + static_cast<int64_t>(threadIdx.x / kWarp) * (bytes / static_cast<int64_t>(sizeof(float)));
}

/// The end of a SumOfRow, whose partial sums the first 16 lanes have: the sum, in all lanes.
__device__ float add_by_halves(float s) {
  for (int half = kRowSums / 2; half > 0; half /= 2) s += __shfl_down_sync(kAllLanes, s, half);
  return __shfl_sync(kAllLanes, s, 0);
}

/// SumOfRow of what other lanes may have written before.
__device__ float sum_of(const float* terms, int count) {
  __syncwarp();
  float s = 0;
  for (int i = lane(); lane() < kRowSums && i < count; i += kRowSums) s += terms[i];
  const float sum = add_by_halves(s);
  __syncwarp();
  return sum;
}

/// SumOfRow of terms that the first `count` lanes have.
__device__ float sum_of_lanes(float mine, int count) {
  const float other = __shfl_down_sync(kAllLanes, mine, kRowSums);
  float s = 0;
  if (lane() < count) s += mine;
  if (lane() + kRowSums < count) s += other;
  return add_by_halves(s);
}

/// What a softmax subtracts: the greatest of the lanes' numbers. NaN is left out, because it makes the sum NaN anyway.
__device__ float greatest_of(float mine) {
  for (int by = kWarp / 2; by > 0; by /= 2) {
    const float other = __shfl_xor_sync(kAllLanes, mine, by);
    mine = other > mine ? other : mine;
  }
  return mine;
}

/// Numbers::make_softmax(), each lane having written its own numbers (i modulo 32).
__device__ void make_softmax(float* at, int count) {
  float mine = -INFINITY;
  for (int i = lane(); i < count; i += kWarp) mine = at[i] > mine ? at[i] : mine;
  const float greatest = greatest_of(mine);
  for (int i = lane(); i < count; i += kWarp) at[i] = exp_f32(at[i] - greatest);
  const float divisor = sum_of(at, count);
  for (int i = lane(); i < count; i += kWarp) at[i] /= divisor;
}
__device__ float softmax_of_lanes(float mine, int count) {
  const float power = exp_f32(mine - greatest_of(lane() < count && mine == mine ? mine : -INFINITY));
  return power / sum_of_lanes(power, count);
}

/// A place of a list, and where it comes: a greater key comes earlier, and of equal orders the smaller place.
__device__ uint64_t key_of(uint32_t order, int place) {
  return static_cast<uint64_t>(order) << 32 | ~static_cast<uint32_t>(place);
}
__device__ int place_of(uint64_t key) { return static_cast<int>(~static_cast<uint32_t>(key)); }

/// The first key after another one, of those that this lane has.
struct NextKey {
  uint64_t after, found = 0;

  __device__ void offer(uint64_t key) {
    if (key < after && key > found) found = key;
  }
  /// Of all lanes.
  __device__ uint64_t of_warp() {
    for (int by = kWarp / 2; by > 0; by /= 2) {
      const uint64_t other = __shfl_xor_sync(kAllLanes, found, by);
      found = other > found ? other : found;
    }
    return found;
  }
};
constexpr uint64_t kBeforeAll = ~uint64_t{0};

/// The first key after another one, of a list of orders that all lanes have written.
__device__ uint64_t next_key(const uint32_t* orders, int count, uint64_t after) {
  NextKey next{after};
  for (int i = lane(); i < count; i += kWarp) next.offer(key_of(orders[i], i));
  return next.of_warp();
}

/// As Router.
struct WarpRouter {
  const RouteProblem& p;
  int experts, topk;
  float* scores;     ///< [experts]
  uint32_t* orders;  ///< [experts], then of groups: of what is chosen by

  __device__ WarpRouter(const RouteProblem& problem)
      : p(problem),
        experts(static_cast<int>(p.logits.cols)),
        topk(static_cast<int>(p.routing.topk)),
        scores(shared_of_warp(warp_bytes(p))),
        orders(reinterpret_cast<uint32_t*>(scores + experts)) {}

  __device__ void route(int64_t token) const {
    score(token);
    if (p.routing.num_groups > 0) close_groups();
    int mine = 0;
    uint64_t key = kBeforeAll;
    for (int i = 0; i < topk; ++i) {
      key = next_key(orders, experts, key);
      if (lane() == i) mine = place_of(key);
    }
    weigh(token, mine);
    __syncwarp();  // the next token's scores are written where these have been read
  }

 private:
  __device__ float choice(int e) const { return p.bias ? scores[e] + p.bias[e] : scores[e]; }

  __device__ void score(int64_t token) const {
    const Routing& r = p.routing;
    for (int e = lane(); e < experts; e += kWarp) {
      const float logit = load_element(p.logits, token, e);
      scores[e] = r.score == ScoreFunction::softmax ? logit : score_of(r.score, logit).value;
    }
    if (r.score == ScoreFunction::softmax && !r.after_topk) make_softmax(scores, experts);
    for (int e = lane(); e < experts; e += kWarp) orders[e] = order_of(choice(e));
    __syncwarp();
  }

  /// Experts of groups that are not chosen get the order 0, which comes last.
  __device__ void close_groups() const {
    const Routing& r = p.routing;
    const int groups = static_cast<int>(r.num_groups), size = experts / groups;
    uint32_t* const of_groups = orders + experts;
    for (int g = lane(); g < groups; g += kWarp) {
      float sum = 0;
      uint64_t key = kBeforeAll;
      for (int64_t i = 0; i < r.group_best; ++i) {
        NextKey next{key};
        for (int e = g * size; e < (g + 1) * size; ++e) next.offer(key_of(orders[e], e));
        key = next.found;
        sum += choice(place_of(key));
      }
      of_groups[g] = order_of(sum);
    }
    __syncwarp();
    uint64_t last = kBeforeAll;
    for (int64_t i = 0; i < r.group_topk; ++i) last = next_key(of_groups, groups, last);
    for (int e = lane(); e < experts; e += kWarp)
      if (key_of(of_groups[e / size], e / size) < last) orders[e] = 0;
  }

  /// mine: the expert that this lane has, one of the first topk.
  __device__ void weigh(int64_t token, int mine) const {
    const Routing& r = p.routing;
    float weight = scores[mine];
    if (r.after_topk) weight = softmax_of_lanes(weight, topk);
    const float divisor = r.renormalize ? sum_of_lanes(weight, topk) + kTinyWeight : 1.0f;
    if (lane() >= topk) return;
    p.weights[token * topk + lane()] = weight / divisor * r.scaling_factor;
    p.ids[token * topk + lane()] = mine;
  }
};

/// As RouterGrad.
struct WarpRouterGrad {
  const RouteGradProblem& p;
  int experts, topk;
  float* line;     ///< [experts]
  float* dlogits;  ///< [experts]

  __device__ WarpRouterGrad(const RouteGradProblem& problem)
      : p(problem),
        experts(static_cast<int>(p.logits.cols)),
        topk(static_cast<int>(p.routing.topk)),
        line(shared_of_warp(warp_bytes(p))),
        dlogits(line + experts) {}

  /// id: the expert of this lane, one of the first topk.
  __device__ void run(int64_t token, int id) const {
    const Routing& r = p.routing;
    for (int e = lane(); e < experts; e += kWarp) line[e] = load_element(p.logits, token, e), dlogits[e] = 0;
    const bool all = r.score == ScoreFunction::softmax && !r.after_topk;
    if (all) make_softmax(line, experts);
    __syncwarp();
    const float mine = lane() < topk ? line[id] : 0;
    float d = lane() < topk ? p.dweights[token * topk + lane()] * r.scaling_factor : 0, common = 0;
    if (r.score != ScoreFunction::softmax) {
      d = through_renormalization(d, score_of(r.score, mine).value) * score_of(r.score, mine).slope;
    } else if (r.after_topk) {
      const float score = softmax_of_lanes(mine, topk);
      d = score * (d - sum_of_lanes(d * score, topk));
    } else {
      d = through_renormalization(d, mine);
      common = sum_of_lanes(d * mine, topk);
    }
    // Of equal ids the last one counts.
    const unsigned same = __match_any_sync(kAllLanes, lane() < topk ? id : -1);
    if (lane() < topk && same >> lane() == 1) dlogits[id] = d;
    __syncwarp();
    for (int e = lane(); e < experts; e += kWarp)
      store_element(p.dlogits, token, e, all ? line[e] * (dlogits[e] - common) : dlogits[e]);
    __syncwarp();
  }

 private:
  __device__ float through_renormalization(float d, float score) const {
    if (!p.routing.renormalize) return d;
    const float divisor = sum_of_lanes(score, topk) + kTinyWeight;
    const float common = sum_of_lanes(d * score, topk) / divisor;
    return (d - common) / divisor;
  }
};

/// Whether a token's ids are those of experts; reports the first that is not.
__device__ bool obey(const RouteGradJob& job, int64_t token) {
  const RouteGradProblem& p = job.problem;
  for (int64_t place = token * p.routing.topk; place < (token + 1) * p.routing.topk; ++place) {
    const int32_t id = p.ids[place];
    if (id >= 0 && id < p.logits.cols) continue;
    const Fault fault{.index = place, .value = id, .limit = p.logits.cols};
    report(job.site, id == -1 ? ValueRule::chosen_expert : ValueRule::expert_id, fault);
    return false;
  }
  return true;
}

/// Whether all lanes' ids are those of experts; reports the first that is not.
__device__ bool obey(const RouteGradJob& job, int64_t place, int id) {
  const auto experts = static_cast<int>(job.problem.logits.cols);
  const unsigned broken = __ballot_sync(kAllLanes, id < 0 || id >= experts);
  if (broken != 0 && (broken & ((1u << lane()) - 1)) == 0 && (broken >> lane() & 1) != 0)
    report(job.site, id == -1 ? ValueRule::chosen_expert : ValueRule::expert_id,
           {.index = place, .value = id, .limit = experts});
  return broken == 0;
}

}  // namespace

extern "C" {

__global__ void route_any(const __grid_constant__ RouteJob job) {
  const Router router(job.problem, job.memory + thread() * Router::bytes(job.problem));
  each_of(job.problem.logits.rows, [&](int64_t token) { router.route(token); });
}

__global__ void route_grad_any(const __grid_constant__ RouteGradJob job) {
  RouterGrad router(job.problem, job.memory + thread() * RouterGrad::bytes(job.problem));
  each_of(job.problem.logits.rows, [&](int64_t token) {
    if (obey(job, token)) router.run(token);
  });
}

__global__ void route_warps(const __grid_constant__ RouteJob job) {
  const WarpRouter router(job.problem);
  each_of_warps(job.problem.logits.rows, [&](int64_t token) { router.route(token); });
}

__global__ void route_grad_warps(const __grid_constant__ RouteGradJob job) {
  const RouteGradProblem& p = job.problem;
  const WarpRouterGrad router(p);
  each_of_warps(p.logits.rows, [&](int64_t token) {
    const int64_t place = token * p.routing.topk + lane();
    const int id = lane() < p.routing.topk ? p.ids[place] : 0;
    if (obey(job, place, id)) router.run(token, id);
  });
}

}  // extern "C"
