// Routing against double, the text of its options, and independence of how work is cut.
#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include <gtest/gtest.h>

#include "guarded.h"
#include "inputs.h"
#include "quire/base/check.h"
#include "quire/base/parallel.h"
#include "quire/operations/operations.h"
#include "quire/spec/logarithm.h"

namespace quire::testing {
namespace {

using Line = std::vector<double>;

Line softmax(Line x) {
  const double greatest = *std::max_element(x.begin(), x.end());
  double total = 0;
  for (double& v : x) total += v = std::exp(v - greatest);
  for (double& v : x) v /= total;
  return x;
}

Line scores(ScoreFunction function, Line x) {
  if (function == ScoreFunction::softmax) return softmax(x);
  for (double& v : x)
    v = function == ScoreFunction::sigmoid ? 1 / (1 + std::exp(-v)) : std::sqrt(std::log1p(std::exp(v)));
  return x;
}

/// The places of the greatest values, of equal ones the smaller place first.
std::vector<size_t> best(const Line& values, std::vector<size_t> places, int64_t count) {
  std::stable_sort(places.begin(), places.end(), [&](size_t a, size_t b) { return values[a] > values[b]; });
  places.resize(static_cast<size_t>(count));
  return places;
}

std::vector<size_t> range(size_t first, size_t count) {
  std::vector<size_t> places(count);
  std::iota(places.begin(), places.end(), first);
  return places;
}

std::vector<size_t> choose(const Routing& r, const Line& choice) {
  std::vector<size_t> open = range(0, choice.size());
  if (r.num_groups > 0) {
    const auto groups = static_cast<size_t>(r.num_groups), size = choice.size() / groups;
    Line totals;
    for (size_t g = 0; g < groups; ++g) {
      totals.push_back(0);
      for (const size_t i : best(choice, range(g * size, size), r.group_best)) totals.back() += choice[i];
    }
    open.clear();
    for (const size_t g : best(totals, range(0, groups), r.group_topk))
      for (const size_t i : range(g * size, size)) open.push_back(i);
    std::sort(open.begin(), open.end());
  }
  return best(choice, open, r.topk);
}

Line weights(const Routing& r, const Line& logits, const std::vector<size_t>& ids) {
  const Line all = r.after_topk ? logits : scores(r.score, logits);
  Line out;
  for (const size_t i : ids) out.push_back(all[i]);
  if (r.after_topk) out = softmax(out);
  const double total = r.renormalize ? std::accumulate(out.begin(), out.end(), 0.0) : 1.0;
  for (double& w : out) w *= static_cast<double>(r.scaling_factor) / total;
  return out;
}

constexpr const char* kRoutings[] = {"softmax:topk=2",
                                     "softmax:topk=3:renormalize",
                                     "softmax:topk=3:after_topk:scaling_factor=0.5",
                                     "softmax:topk=4:after_topk:num_groups=4:group_topk=2",
                                     "sigmoid:topk=4:renormalize:num_groups=6:group_topk=3:group_best=2",
                                     "sqrtsoftplus:topk=24:scaling_factor=2.5"};
constexpr int64_t kTokens = 70, kExperts = 24;

Line line_of(const Matrix& x, int64_t row) {
  Line out;
  for (int64_t e = 0; e < x.cols; ++e)
    out.push_back(static_cast<double>(load_element(x.data, x.dtype, row * x.row_stride + e)));
  return out;
}

struct Routed {
  Guarded weights, ids;
  explicit Routed(const RouteProblem& problem)
      : weights(problem.logits.rows * problem.routing.topk * 4), ids(problem.logits.rows * problem.routing.topk * 4) {
    RouteProblem p = problem;
    p.weights = weights.as<float>();
    p.ids = ids.as<int32_t>();
    route(p, here());
    EXPECT_TRUE(weights.intact() && ids.intact());
  }
};

TEST(Route, LogIsWithinItsBoundOfDouble) {
  // Each magnitude that e^x of a logit can have, and what is neither.
  for (uint32_t bits = 0; bits < std::bit_cast<uint32_t>(0x1p30f); bits += 10007) {
    const float x = std::bit_cast<float>(bits), found = log1p_f32(x);
    const double expected = std::log1p(static_cast<double>(x));
    // Below the normal numbers the result is the nearest number.
    const double bound = std::max(expected * 1.01 * 0x1p-24, 0x1p-150);
    ASSERT_LE(std::abs(static_cast<double>(found) - expected), bound) << x;
  }
  EXPECT_EQ(log1p_f32(INFINITY), INFINITY);
  EXPECT_TRUE(std::isnan(log1p_f32(NAN)));
}

TEST(Route, ChoosesAndWeighsAsInDouble) {
  uint64_t seed = 0;
  for (const char* text : kRoutings)
    for (const DType dtype : kFloatTypes)
      for (const bool biased : {false, true}) {
        SCOPED_TRACE(quire::text(text, " of ", name(dtype), biased ? " with a bias" : ""));
        const Routing r = Routing::parse(text);
        const Input logits({kTokens, kExperts, 3, 1}, dtype, Kind::normal, ++seed);
        Array<float> bias(kExperts);
        for (size_t e = 0; e < bias.size(); ++e) bias[e] = biased ? static_cast<float>(e % 5) * 0.07f : 0.0f;
        Routed got({.routing = r, .logits = logits, .bias = biased ? bias.data() : nullptr});
        for (int64_t t = 0; t < kTokens; ++t) {
          const Line line = line_of(logits, t);
          Line choice = r.after_topk ? line : scores(r.score, line);
          for (size_t e = 0; e < choice.size(); ++e) choice[e] += static_cast<double>(bias[e]);
          const std::vector<size_t> ids = choose(r, choice);
          const Line expected = weights(r, line, ids);
          for (size_t i = 0; i < ids.size(); ++i) {
            const auto place = static_cast<size_t>(t * r.topk) + i;
            ASSERT_EQ(got.ids.as<int32_t>()[place], ids[i]) << "token " << t;
            ASSERT_NEAR(static_cast<double>(got.weights.as<float>()[place]), expected[i], 1e-6 * expected[i]);
          }
        }
      }
}

TEST(Route, GradientsAreDifferencesOfWeights) {
  for (const char* text : kRoutings) {
    SCOPED_TRACE(text);
    const Routing r = Routing::parse(text);
    const Input logits({9, kExperts}, DType::f32, Kind::normal, 7), dweights({9, r.topk}, DType::f32, Kind::normal, 8);
    Routed got({.routing = r, .logits = logits});
    Guarded dlogits(9 * kExperts * 4);
    const auto* d = static_cast<const float*>(Matrix(dweights).data);
    route_grad({r, logits, got.ids.as<int32_t>(), d, {dlogits.data(), DType::f32, 9, kExperts, kExperts}}, here());
    ASSERT_TRUE(dlogits.intact());
    for (int64_t t = 0; t < 9; ++t) {
      const int32_t* chosen = got.ids.as<int32_t>() + t * r.topk;
      const std::vector<size_t> ids(chosen, chosen + r.topk);
      const auto loss = [&](const Line& line) {
        const Line w = weights(r, line, ids);
        double total = 0;
        for (size_t i = 0; i < ids.size(); ++i)
          total += w[i] * static_cast<double>(d[t * r.topk + static_cast<int64_t>(i)]);
        return total;
      };
      for (size_t e = 0; e < kExperts; ++e) {
        constexpr double step = 1e-4;
        Line above = line_of(logits, t), below = above;
        above[e] += step, below[e] -= step;
        const double expected = (loss(above) - loss(below)) / (2 * step);
        ASSERT_NEAR(static_cast<double>(dlogits.as<float>()[t * kExperts + static_cast<int64_t>(e)]), expected, 1e-5);
      }
    }
  }
}

TEST(Route, DoesNotDependOnHowWorkIsCut) {
  const Input logits({3000, 16}, DType::bf16, Kind::ties, 4);
  const RouteProblem problem{.routing = Routing::parse("softmax:topk=4:renormalize"), .logits = logits};
  const Routed whole(problem);
  const Executor before = set_executor([](int64_t count, int64_t grain, const auto& body) {
    for (int64_t begin = (count - 1) / grain * grain; begin >= 0; begin -= grain)
      body(begin, std::min(begin + grain, count));
  });
  const Routed cut(problem);
  set_executor(before);
  EXPECT_TRUE(std::equal(whole.weights.as<float>(), whole.weights.as<float>() + 12000, cut.weights.as<float>()));
  EXPECT_TRUE(std::equal(whole.ids.as<int32_t>(), whole.ids.as<int32_t>() + 12000, cut.ids.as<int32_t>()));
}

TEST(Route, TextIsCanonicalAndReadBack) {
  constexpr std::pair<const char*, const char*> kTexts[] = {
      {"softmax:topk=2", "softmax:topk=2"},
      {"sigmoid:renormalize:scaling_factor=2.50:topk=8", "sigmoid:topk=8:renormalize:scaling_factor=2.5"},
      {"softmax:topk=8:group_topk=4:num_groups=8", "softmax:topk=8:num_groups=8:group_topk=4:group_best=2"},
      {"softmax:topk=1:after_topk:scaling_factor=1", "softmax:topk=1:after_topk"}};
  for (const auto& [written, canonical] : kTexts) {
    const Routing r = Routing::parse(written);
    EXPECT_EQ(r.to_string(), canonical);
    EXPECT_EQ(Routing::parse(r.to_string()), r);
  }
  EXPECT_THROW(Routing::parse("softmax:topk=-1"), Error);
  EXPECT_THROW(Routing::parse("softmax:topk=2:"), Error);
  EXPECT_THROW(Routing::parse(""), Error);
}

TEST(Route, CapacityDropsTheLaterOnes) {
  const Array<int32_t> ids{1, 0, 1, 1, -1, 0, 1};
  Array<int32_t> kept(7);
  const auto limit = [&](int64_t experts) {
    limit_capacity({.ids = ids.data(), .count = 7, .num_experts = experts, .capacity = 2, .kept = kept.data()}, here());
  };
  limit(2);
  EXPECT_EQ(kept, (Array<int32_t>{1, 0, 1, -1, -1, 0, -1}));
  EXPECT_THROW(limit(1), Error);
}

}  // namespace
}  // namespace quire::testing
