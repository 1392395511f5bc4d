// Which experts a token chooses, their weights, and the gradient of these (moe-reference.md 1): the arithmetic of one
// token, for the kernels of every device, which lend it memory.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "quire/spec/elementary.h"
#include "quire/spec/logarithm.h"
#include "quire/spec/matrix_element.h"
#include "quire/spec/moe_problem.h"
#include "quire/spec/sums.h"

namespace quire {

/// Keeps a sum of weights that are all 0 from being divided by.
inline constexpr float kTinyWeight = 1e-20f;

/// A score and its derivative, of a function of one logit.
struct Score {
  float value, slope;
};

QUIRE_HOST_DEVICE inline Score score_of(ScoreFunction function, float x) {
  const float s = sigmoid_f32(x);
  if (function == ScoreFunction::sigmoid) return {s, s * sigmoid_f32(-x)};
  const float softplus = x > 20.0f ? x : log1p_f32(exp_f32(x));
  const float root = std::sqrt(softplus);
  return {root, root > 0 ? s / (2.0f * root) : root};
}

/// Whether a comes before b where the greatest is first. NaN comes after everything.
constexpr bool exceeds(float a, float b) { return a > b || (b != b && a == a); }

/// A number that orders floats as exceeds() does: a greater one comes earlier. Never 0.
constexpr uint32_t order_of(float x) {
  if (x != x) return 1;
  const uint32_t bits = std::bit_cast<uint32_t>(x + 0.0f), sign = 0x80000000u;  // both zeros are one
  return (bits & sign) != 0 ? ~bits : bits | sign;
}

/// The greatest of what it was offered, greatest first; of equals those offered earlier. `values` and `places` have
/// `room` elements each, at least one.
class Best {
 public:
  constexpr Best(float* values, int32_t* places, int64_t room) : values_(values), places_(places), room_(room) {}

  constexpr void clear() { held_ = 0; }
  constexpr void offer(float value, int64_t place) {
    if (held_ == room_ && !exceeds(value, values_[held_ - 1])) return;
    if (held_ < room_) ++held_;
    int64_t i = held_ - 1;
    for (; i > 0 && exceeds(value, values_[i - 1]); --i) values_[i] = values_[i - 1], places_[i] = places_[i - 1];
    values_[i] = value, places_[i] = static_cast<int32_t>(place);
  }
  /// Of the values that are held, from the greatest to the smallest.
  constexpr float sum() const {
    float sum = 0;
    for (int64_t i = 0; i < held_; ++i) sum += values_[i];
    return sum;
  }
  constexpr bool has(int64_t place) const {
    bool found = false;
    for (int64_t i = 0; i < held_; ++i) found |= places_[i] == place;
    return found;
  }

 private:
  float* values_;
  int32_t* places_;
  int64_t room_, held_ = 0;
};

/// Numbers that are added and multiplied in the order of sums.h.
struct Numbers {
  float* at;
  int64_t count;

  QUIRE_HOST_DEVICE float sum() const {
    return SumOfRow{}(count, [this](int64_t i) { return at[i]; });
  }
  QUIRE_HOST_DEVICE float dot(const float* other) const {
    return SumOfRow{}(count, [this, other](int64_t i) { return at[i] * other[i]; });
  }
  QUIRE_HOST_DEVICE void make_softmax() const {
    float greatest = at[0];
    for (int64_t i = 0; i < count; ++i) greatest = at[i] > greatest ? at[i] : greatest;
    for (int64_t i = 0; i < count; ++i) at[i] = exp_f32(at[i] - greatest);
    const float divisor = sum();
    for (int64_t i = 0; i < count; ++i) at[i] /= divisor;
  }
};

/// One token after the other.
class Router {
 public:
  /// Bytes of the memory that it is lent, aligned to 4.
  static constexpr int64_t bytes(const RouteProblem& p) {
    return 4 * (p.logits.cols + 2 * (p.routing.group_topk + p.routing.group_best));
  }
  QUIRE_HOST_DEVICE Router(const RouteProblem& p, void* memory)
      : p_(p), scores_{static_cast<float*>(memory), p.logits.cols} {}

  QUIRE_HOST_DEVICE void route(int64_t token) const {
    const Routing& r = p_.routing;
    float* const weights = p_.weights + token * r.topk;
    int32_t* const ids = p_.ids + token * r.topk;
    score(token);
    Best chosen(weights, ids, r.topk);
    choose(chosen);
    weigh(ids, {weights, r.topk});
  }

 private:
  QUIRE_HOST_DEVICE void score(int64_t token) const {
    const Routing& r = p_.routing;
    for (int64_t e = 0; e < scores_.count; ++e) {
      const float logit = load_element(p_.logits, token, e);
      scores_.at[e] = r.score == ScoreFunction::softmax ? logit : score_of(r.score, logit).value;
    }
    if (r.score == ScoreFunction::softmax && !r.after_topk) scores_.make_softmax();
  }

  QUIRE_HOST_DEVICE void choose(Best& chosen) const {
    const Routing& r = p_.routing;
    if (r.num_groups == 0) return offer(0, scores_.count, chosen);
    float* const values = scores_.at + scores_.count;
    auto* const places = reinterpret_cast<int32_t*>(values + r.group_topk + r.group_best);
    Best groups(values, places, r.group_topk), in_group(values + r.group_topk, places + r.group_topk, r.group_best);
    const int64_t size = scores_.count / r.num_groups;
    for (int64_t g = 0; g < r.num_groups; ++g) {
      in_group.clear();
      offer(g * size, size, in_group);
      groups.offer(in_group.sum(), g);
    }
    for (int64_t g = 0; g < r.num_groups; ++g)
      if (groups.has(g)) offer(g * size, size, chosen);
  }

  QUIRE_HOST_DEVICE void offer(int64_t first, int64_t count, Best& to) const {
    for (int64_t e = first; e < first + count; ++e) to.offer(p_.bias ? scores_.at[e] + p_.bias[e] : scores_.at[e], e);
  }

  QUIRE_HOST_DEVICE void weigh(const int32_t* ids, const Numbers& weights) const {
    const Routing& r = p_.routing;
    for (int64_t i = 0; i < weights.count; ++i) weights.at[i] = scores_.at[ids[i]];
    if (r.after_topk) weights.make_softmax();
    const float divisor = r.renormalize ? weights.sum() + kTinyWeight : 1.0f;
    for (int64_t i = 0; i < weights.count; ++i) weights.at[i] = weights.at[i] / divisor * r.scaling_factor;
  }

  const RouteProblem& p_;
  Numbers scores_;
};

/// The same for gradients.
class RouterGrad {
 public:
  static constexpr int64_t bytes(const RouteGradProblem& p) { return 4 * 2 * (p.logits.cols + p.routing.topk); }
  QUIRE_HOST_DEVICE RouterGrad(const RouteGradProblem& p, void* memory)
      : p_(p),
        line_{static_cast<float*>(memory), p.logits.cols},
        dlogits_(line_.at + line_.count),
        scores_{dlogits_ + line_.count, p.routing.topk},
        dscores_{scores_.at + scores_.count, p.routing.topk} {}

  /// The token's ids are numbers of experts.
  QUIRE_HOST_DEVICE void run(int64_t token) {
    const Routing& r = p_.routing;
    ids_ = p_.ids + token * r.topk;
    for (int64_t e = 0; e < line_.count; ++e) line_.at[e] = load_element(p_.logits, token, e), dlogits_[e] = 0;
    for (int64_t i = 0; i < r.topk; ++i) dscores_.at[i] = p_.dweights[token * r.topk + i] * r.scaling_factor;
    if (r.score != ScoreFunction::softmax)
      of_each();
    else if (r.after_topk)
      of_chosen();
    else
      of_all();
    for (int64_t e = 0; e < line_.count; ++e) store_element(p_.dlogits, token, e, dlogits_[e]);
  }

 private:
  QUIRE_HOST_DEVICE float of_expert(int64_t i) const { return line_.at[ids_[i]]; }
  QUIRE_HOST_DEVICE float& dlogit(int64_t i) const { return dlogits_[ids_[i]]; }

  /// dscores_ from gradients of the weights to those of the scores.
  QUIRE_HOST_DEVICE void through_renormalization() const {
    if (!p_.routing.renormalize) return;
    const float divisor = scores_.sum() + kTinyWeight;
    const float common = dscores_.dot(scores_.at) / divisor;
    for (int64_t i = 0; i < dscores_.count; ++i) dscores_.at[i] = (dscores_.at[i] - common) / divisor;
  }

  QUIRE_HOST_DEVICE void of_each() const {
    const ScoreFunction f = p_.routing.score;
    for (int64_t i = 0; i < scores_.count; ++i) scores_.at[i] = score_of(f, of_expert(i)).value;
    through_renormalization();
    for (int64_t i = 0; i < scores_.count; ++i) dlogit(i) = dscores_.at[i] * score_of(f, of_expert(i)).slope;
  }

  QUIRE_HOST_DEVICE void of_chosen() const {
    for (int64_t i = 0; i < scores_.count; ++i) scores_.at[i] = of_expert(i);
    scores_.make_softmax();
    const float common = dscores_.dot(scores_.at);
    for (int64_t i = 0; i < scores_.count; ++i) dlogit(i) = scores_.at[i] * (dscores_.at[i] - common);
  }

  QUIRE_HOST_DEVICE void of_all() const {
    line_.make_softmax();
    for (int64_t i = 0; i < scores_.count; ++i) scores_.at[i] = of_expert(i);
    through_renormalization();
    const float common = dscores_.dot(scores_.at);
    for (int64_t i = 0; i < scores_.count; ++i) dlogit(i) = dscores_.at[i];
    for (int64_t e = 0; e < line_.count; ++e) dlogits_[e] = line_.at[e] * (dlogits_[e] - common);
  }

  const RouteGradProblem& p_;
  const int32_t* ids_ = nullptr;
  Numbers line_;  ///< logits of a token, later their softmax
  float* dlogits_;
  Numbers scores_, dscores_;  ///< of the chosen experts
};

}  // namespace quire
