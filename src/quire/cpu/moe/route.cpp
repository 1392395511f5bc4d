#include "quire/cpu/moe/moe.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include "quire/base/fault.h"
#include "quire/base/parallel.h"
#include "quire/cpu/moe/sum.h"
#include "quire/format/element.h"
#include "quire/spec/elementary.h"

namespace quire::cpu {
namespace {

/// Keeps a sum of weights that are all 0 from being divided by.
constexpr float kTiny = 1e-20f;
/// Logits that are worth a thread.
constexpr int64_t kGrain = 1 << 13;

using Line = std::vector<float>;

float total(std::span<const float> x) {
  return sum(std::ssize(x), [&](int64_t i) { return x[static_cast<size_t>(i)]; });
}

float dot(std::span<const float> x, std::span<const float> y) {
  return sum(std::ssize(x), [&](int64_t i) { return x[static_cast<size_t>(i)] * y[static_cast<size_t>(i)]; });
}

void softmax(std::span<float> x) {
  float greatest = x[0];
  for (const float value : x) greatest = value > greatest ? value : greatest;
  for (float& value : x) value = exp_f32(value - greatest);
  const float divisor = total(x);
  for (float& value : x) value /= divisor;
}

/// A score and its derivative, of a function of one logit.
struct Score {
  float value, slope;
};

Score score_of(ScoreFunction function, float x) {
  const float s = sigmoid_f32(x);
  if (function == ScoreFunction::sigmoid) return {s, s * sigmoid_f32(-x)};
  const float softplus = x > 20.0f ? x : std::log1p(exp_f32(x));
  const float root = std::sqrt(softplus);
  return {root, root > 0 ? s / (2.0f * root) : root};
}

struct Ranked {
  float value;
  int32_t place;
};

/// NaN comes after everything.
bool exceeds(float a, float b) { return a > b || (std::isnan(b) && !std::isnan(a)); }

/// The greatest of what it was offered, greatest first; of equals those offered earlier.
class Best {
 public:
  explicit Best(int64_t count) : list_(static_cast<size_t>(count)) {}
  void clear() { held_ = 0; }
  void offer(float value, int64_t place) {
    if (held_ == list_.size() && !exceeds(value, list_.back().value)) return;
    held_ = std::min(held_ + 1, list_.size());
    size_t i = held_ - 1;
    for (; i > 0 && exceeds(value, list_[i - 1].value); --i) list_[i] = list_[i - 1];
    list_[i] = {value, static_cast<int32_t>(place)};
  }
  std::span<const Ranked> found() const { return {list_.data(), held_}; }

 private:
  std::vector<Ranked> list_;
  size_t held_ = 0;
};

void load(const Matrix& x, int64_t row, Line& line) {
  for (int64_t i = 0; i < x.cols; ++i)
    line[static_cast<size_t>(i)] = load_element(x.data, x.dtype, row * x.row_stride + i);
}

/// One token after the other, in memory that is used again.
class Router {
 public:
  Router(const RouteProblem& p)
      : p_(p),
        r_(p.routing),
        experts_(p.logits.cols),
        logits_(static_cast<size_t>(experts_)),
        scores_(logits_),
        choice_(logits_),
        chosen_(r_.topk),
        groups_(r_.group_topk),
        in_group_(r_.group_best) {}

  void route(int64_t token) {
    load(p_.logits, token, logits_);
    score();
    choose();
    float* weights = p_.weights + token * r_.topk;
    int32_t* ids = p_.ids + token * r_.topk;
    for (const Ranked& one : chosen_.found()) *ids++ = one.place;
    weigh({ids - r_.topk, ids}, {weights, static_cast<size_t>(r_.topk)});
  }

 private:
  void score() {
    if (r_.score == ScoreFunction::softmax) {
      scores_ = logits_;
      if (!r_.after_topk) softmax(scores_);
    } else {
      for (size_t i = 0; i < logits_.size(); ++i) scores_[i] = score_of(r_.score, logits_[i]).value;
    }
    for (size_t i = 0; i < logits_.size(); ++i) choice_[i] = p_.bias ? scores_[i] + p_.bias[i] : scores_[i];
  }

  void choose() {
    chosen_.clear();
    if (r_.num_groups == 0) return offer(0, experts_, chosen_);
    const int64_t size = experts_ / r_.num_groups;
    groups_.clear();
    for (int64_t g = 0; g < r_.num_groups; ++g) {
      in_group_.clear();
      offer(g * size, size, in_group_);
      float score = 0;
      for (const Ranked& one : in_group_.found()) score += one.value;
      groups_.offer(score, g);
    }
    std::vector<Ranked> open(groups_.found().begin(), groups_.found().end());
    std::sort(open.begin(), open.end(), [](const Ranked& a, const Ranked& b) { return a.place < b.place; });
    for (const Ranked& group : open) offer(group.place * size, size, chosen_);
  }

  void offer(int64_t first, int64_t count, Best& to) const {
    for (int64_t i = first; i < first + count; ++i) to.offer(choice_[static_cast<size_t>(i)], i);
  }

  void weigh(std::span<const int32_t> ids, std::span<float> weights) const {
    for (size_t i = 0; i < ids.size(); ++i) weights[i] = scores_[static_cast<size_t>(ids[i])];
    if (r_.after_topk) softmax(weights);
    const float divisor = r_.renormalize ? total(weights) + kTiny : 1.0f;
    for (float& w : weights) w = w / divisor * r_.scaling_factor;
  }

  const RouteProblem& p_;
  const Routing& r_;
  int64_t experts_;
  Line logits_, scores_, choice_;
  Best chosen_, groups_, in_group_;
};

/// The same for gradients. scores_ and dscores_ are of the chosen experts.
class RouterGrad {
 public:
  RouterGrad(const RouteGradProblem& p)
      : p_(p),
        r_(p.routing),
        line_(static_cast<size_t>(p.logits.cols)),
        dlogits_(line_),
        scores_(static_cast<size_t>(r_.topk)),
        dscores_(scores_) {}

  void run(int64_t token) {
    load(p_.logits, token, line_);
    ids_ = {p_.ids + token * r_.topk, static_cast<size_t>(r_.topk)};
    for (size_t i = 0; i < ids_.size(); ++i) {
      const int64_t place = token * r_.topk + static_cast<int64_t>(i);
      check_expert_id("route_bwd", ids_[i], place, p_.logits.cols);
      if (ids_[i] < 0) raise("route_bwd", ValueRule::chosen_expert, {.index = place, .value = ids_[i]});
      dscores_[i] = p_.dweights[place] * r_.scaling_factor;
    }
    std::fill(dlogits_.begin(), dlogits_.end(), 0.0f);
    if (r_.score != ScoreFunction::softmax) {
      of_each();
    } else if (r_.after_topk) {
      of_chosen();
    } else {
      of_all();
    }
    for (int64_t e = 0; e < p_.logits.cols; ++e)
      store_element(p_.dlogits.data, p_.dlogits.dtype, token * p_.dlogits.row_stride + e,
                    dlogits_[static_cast<size_t>(e)]);
  }

 private:
  float of_expert(size_t i) const { return line_[static_cast<size_t>(ids_[i])]; }
  float& dlogit(size_t i) { return dlogits_[static_cast<size_t>(ids_[i])]; }

  /// dscores_ from gradients of the weights to those of the scores.
  void through_renormalization() {
    if (!r_.renormalize) return;
    const float divisor = total(scores_) + kTiny;
    const float common = dot(dscores_, scores_) / divisor;
    for (float& d : dscores_) d = (d - common) / divisor;
  }

  void of_each() {
    for (size_t i = 0; i < ids_.size(); ++i) scores_[i] = score_of(r_.score, of_expert(i)).value;
    through_renormalization();
    for (size_t i = 0; i < ids_.size(); ++i) dlogit(i) = dscores_[i] * score_of(r_.score, of_expert(i)).slope;
  }

  void of_chosen() {
    for (size_t i = 0; i < ids_.size(); ++i) scores_[i] = of_expert(i);
    softmax(scores_);
    const float common = dot(dscores_, scores_);
    for (size_t i = 0; i < ids_.size(); ++i) dlogit(i) = scores_[i] * (dscores_[i] - common);
  }

  void of_all() {
    softmax(line_);
    for (size_t i = 0; i < ids_.size(); ++i) scores_[i] = of_expert(i);
    through_renormalization();
    const float common = dot(dscores_, scores_);
    for (size_t i = 0; i < ids_.size(); ++i) dlogit(i) = dscores_[i];
    for (size_t i = 0; i < line_.size(); ++i) dlogits_[i] = line_[i] * (dlogits_[i] - common);
  }

  const RouteGradProblem& p_;
  const Routing& r_;
  std::span<const int32_t> ids_;
  Line line_;  ///< logits of a token, later their softmax
  Line dlogits_, scores_, dscores_;
};

template <class Worker, class Problem>
void for_each_token(const Problem& p, void (Worker::*run)(int64_t)) {
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, p.logits.cols));
  parallel_for(p.logits.rows, grain, [&](int64_t begin, int64_t end) {
    Worker worker(p);
    for (int64_t token = begin; token < end; ++token) (worker.*run)(token);
  });
}

}  // namespace

void check_expert_id(const char* op, int32_t id, int64_t place, int64_t num_experts) {
  if (id < -1 || id >= num_experts) [[unlikely]]
    raise(op, ValueRule::expert_id, {.index = place, .value = id, .limit = num_experts});
}

void route(const RouteProblem& problem, const Context&) { for_each_token(problem, &Router::route); }

void route_grad(const RouteGradProblem& problem, const Context&) { for_each_token(problem, &RouterGrad::run); }

void limit_capacity(const CapacityProblem& p, const Context&) {
  std::vector<int64_t> load(static_cast<size_t>(p.num_experts));
  for (int64_t i = 0; i < p.count; ++i) {
    const int32_t id = p.ids[i];
    check_expert_id("limit_capacity", id, i, p.num_experts);
    p.kept[i] = id >= 0 && load[static_cast<size_t>(id)]++ < p.capacity ? id : -1;
  }
}

}  // namespace quire::cpu
