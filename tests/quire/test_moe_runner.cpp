// Runners with weights: a mixture computed expert by expert in float64 from quantized operands, and what neither loads,
// threads nor memory may change.
#include <cmath>
#include <cstring>
#include <thread>

#include "inputs.h"
#include "mixtures.h"
#include "quantized.h"
#include "quire/base/parallel.h"
#include "quire/format/element.h"
#include "quire/runner/linear_runner.h"

namespace quire::testing {
namespace {

/// Weights and a load: T tokens choose top_k of E experts each, some of them none.
struct Mixture {
  Mixture(int64_t tokens, int64_t top_k, uint64_t seed)
      : x({tokens, kHidden, 3}, DType::bf16, Kind::normal, seed), tokens_(tokens), top_k_(top_k) {
    Random r(seed);
    for (int64_t i = 0; i < tokens * top_k; ++i) {
      ids.push_back(static_cast<int32_t>(r.below(kExperts + 1)) - 1);
      weights.push_back(static_cast<float>(r.uniform()));
    }
  }
  Choices choices() const { return {ids.data(), weights.data(), tokens_, top_k_}; }
  /// Calibrated scales of each expert's inputs: about those of normal x, powers of two times small integers.
  static float x_scale(int64_t e) { return static_cast<float>(8 + e) * 0x1p-13f; }
  static float act_scale(int64_t e) { return static_cast<float>(16 - e) * 0x1p-10f; }

  static constexpr int64_t kExperts = 6, kHidden = 48, kInner = 40;
  Input x, w13{{kExperts * 2 * kInner, kHidden}, DType::bf16, Kind::normal, 11},
      w2{{kExperts * kHidden, kInner}, DType::bf16, Kind::normal, 12};
  std::vector<int32_t> ids;
  std::vector<float> weights;

 private:
  int64_t tokens_, top_k_;
};

MoeRunner runner_of(const Mixture& m, std::string_view spec, std::string_view f = "swiglu", bool on_input = false) {
  const QuantSpec s = QuantSpec::parse(spec);
  return {experts_of(m.w13, m.w2, Mixture::kExperts, s),
          {.x = s, .activation = Activation::parse(f), .weight_on_input = on_input}};
}

/// The rowwise codes of m, decoded.
std::vector<float> decoded(const Matrix& m, const QuantSpec& spec, std::optional<float> amax = {}) {
  const QuantizeOptions options{.directions = {true, false}, .amax = amax};
  return dequantized(reference_runner(), quantized(reference_runner(), spec, m, options), Direction::rowwise);
}

/// x w^T of what the codes stand for, rounded to bfloat16; the sums are exact but for float64's rounding.
Guarded product_of(const Matrix& x, const Matrix& w, const QuantSpec& spec, std::optional<float> amax = {}) {
  const std::vector<float> a = decoded(x, spec, amax), b = decoded(w, spec);
  Guarded out(x.rows * w.rows * 2);
  for (int64_t i = 0; i < x.rows; ++i)
    for (int64_t j = 0; j < w.rows; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < x.cols; ++k)
        sum += static_cast<double>(a[static_cast<size_t>(i * x.cols + k)]) *
               static_cast<double>(b[static_cast<size_t>(j * x.cols + k)]);
      store_element(out.data(), DType::bf16, i * w.rows + j, static_cast<float>(sum));
    }
  return out;
}

/// w2 swiglu(w13 x) of rows in bfloat16, and what their inputs' amaxes were calibrated to, if they were.
struct Network {
  Matrix w13, w2;
  std::optional<float> x_amax{}, act_amax{};

  Guarded of(const Matrix& x, const QuantSpec& spec) const {
    const int64_t inner = w2.cols;
    const Guarded h = product_of(x, w13, spec, x_amax);
    const Matrix h_view{h.data(), DType::bf16, x.rows, 2 * inner, 2 * inner};
    Guarded act(x.rows * inner * 2);
    for (int64_t i = 0; i < x.rows; ++i)
      for (int64_t j = 0; j < inner; ++j) {
        const double gate = at(h_view, i, j), up = at(h_view, i, inner + j);
        store_element(act.data(), DType::bf16, i * inner + j, static_cast<float>(up * gate / (1 + std::exp(-gate))));
      }
    return product_of({act.data(), DType::bf16, x.rows, inner, inner}, w2, spec, act_amax);
  }
};

/// The e-th expert of a mixture, its inputs calibrated to amaxes of its own if there are any.
Network network(const Mixture& m, int64_t e, bool calibrated = false) {
  Network n{slice(m.w13, e * 2 * Mixture::kInner, 2 * Mixture::kInner),
            slice(m.w2, e * Mixture::kHidden, Mixture::kHidden)};
  if (calibrated) n.x_amax = 2688 * Mixture::x_scale(e), n.act_amax = 2688 * Mixture::act_scale(e);
  return n;
}

struct MixtureOptions {
  bool on_input = false, calibrated = false;
  std::optional<Network> shared{};
};

/// The mixture, one expert after the other in float64; what is between stages is bfloat16.
std::vector<double> expected(const Mixture& m, const QuantSpec& spec, const MixtureOptions& options = {}) {
  const Matrix x = m.x;
  const Choices c = m.choices();
  std::vector<double> y(static_cast<size_t>(x.rows * x.cols), 0.0);
  for (int64_t e = 0; e < Mixture::kExperts; ++e) {
    std::vector<int64_t> mine;
    for (int64_t i = 0; i < c.count(); ++i)
      if (c.ids[i] == e) mine.push_back(i);
    const int64_t rows = static_cast<int64_t>(mine.size());
    if (rows == 0) continue;
    Guarded gathered(rows * x.cols * 2);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < x.cols; ++j) {
        const int64_t from = mine[static_cast<size_t>(i)];
        const double weight = options.on_input ? static_cast<double>(c.weights[from]) : 1.0;
        store_element(gathered.data(), DType::bf16, i * x.cols + j,
                      static_cast<float>(weight * at(x, from / c.top_k, j)));
      }
    const Guarded out =
        network(m, e, options.calibrated).of({gathered.data(), DType::bf16, rows, x.cols, x.cols}, spec);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < x.cols; ++j) {
        const int64_t to = mine[static_cast<size_t>(i)];
        const double weight = options.on_input ? 1.0 : static_cast<double>(c.weights[to]);
        y[static_cast<size_t>(to / c.top_k * x.cols + j)] +=
            weight * static_cast<double>(load_element(out.data(), DType::bf16, i * x.cols + j));
      }
  }
  if (!options.shared) return y;
  const Guarded shared = options.shared->of(x, spec);
  for (size_t i = 0; i < y.size(); ++i)
    y[i] += static_cast<double>(load_element(shared.data(), DType::bf16, static_cast<int64_t>(i)));
  return y;
}

double relative_error(const std::vector<double>& y, const Guarded& got) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < y.size(); ++i) {
    const double d = y[i] - static_cast<double>(load_element(got.data(), DType::bf16, static_cast<int64_t>(i)));
    error += d * d;
    norm += y[i] * y[i];
  }
  return norm > 0 ? std::sqrt(error / norm) : std::sqrt(error);
}

constexpr std::string_view kSpecs[] = {"nvfp4", "nvfp4:row_scaled", "mxfp8", "mxfp4", "fp8_row", "fp8_block"};

TEST(MoeRunner, AnyLoadGivesWhatEachExpertGivesInFloat64) {
  for (const std::string_view spec : kSpecs)
    for (const int64_t tokens : {1, 2, 17, 64})
      for (const bool on_input : {false, true}) {
        SCOPED_TRACE(text(spec, ", ", tokens, " tokens", on_input ? ", weights on input" : ""));
        const Mixture m(tokens, 3, static_cast<uint64_t>(tokens));
        MoeRunner runner = runner_of(m, spec, "swiglu", on_input);
        // A sum of another order may end on the other side of a rounding, and then a code be another.
        EXPECT_LT(relative_error(expected(m, QuantSpec::parse(spec), {.on_input = on_input}),
                                 result_of(runner, m.x, m.choices())),
                  spec.find("4") != std::string_view::npos ? 1.5e-2 : 6e-3);
      }
}

TEST(MoeRunner, ASharedExpertHasAllTokensAndIsAdded) {
  constexpr int64_t kSharedInner = 56;
  const Input w13({2 * kSharedInner, Mixture::kHidden}, DType::bf16, Kind::normal, 21),
      w2({Mixture::kHidden, kSharedInner}, DType::bf16, Kind::normal, 22);
  for (const std::string_view text : {"nvfp4", "mxfp8"})
    for (const bool on_input : {false, true}) {
      SCOPED_TRACE(quire::text(text, on_input ? ", weights on input" : ""));
      const QuantSpec spec = QuantSpec::parse(text);
      Mixture m(17, 3, 8);
      MoeRunner runner(experts_of(m.w13, m.w2, Mixture::kExperts, spec),
                       {.x = spec, .activation = Activation::parse("swiglu"), .weight_on_input = on_input},
                       Experts{PreparedWeight(w13, spec), PreparedWeight(w2, spec)});
      const MixtureOptions options{.on_input = on_input, .shared = Network{w13, w2}};
      const double bound = spec.packed() ? 1.5e-2 : 6e-3;
      EXPECT_LT(relative_error(expected(m, spec, options), result_of(runner, m.x, m.choices())), bound);
      m.ids.assign(m.ids.size(), -1);  // tokens of no expert have it all the same
      EXPECT_LT(relative_error(expected(m, spec, options), result_of(runner, m.x, m.choices())), bound);
    }
}

/// The mixture's experts with the static scales of their inputs.
Experts calibrated_experts(const Mixture& m, const QuantSpec& spec) {
  WeightOptions first{.count = Mixture::kExperts}, second = first;
  for (int64_t e = 0; e < Mixture::kExperts; ++e) {
    first.input_scales.push_back(Mixture::x_scale(e));
    second.input_scales.push_back(Mixture::act_scale(e));
  }
  return {PreparedWeight(m.w13, spec, first), PreparedWeight(m.w2, spec, second)};
}

TEST(MoeRunner, CalibratedScalesOfEachExpertTakeThePlaceOfMeasuredAmaxes) {
  const QuantSpec spec = QuantSpec::parse("nvfp4");
  const Mixture m(17, 3, 8);
  MoeRunner runner(calibrated_experts(m, spec), {.x = spec, .activation = Activation::parse("swiglu")});
  const Guarded y = result_of(runner, m.x, m.choices());
  EXPECT_LT(relative_error(expected(m, spec, {.calibrated = true}), y), 1.5e-2);
  EXPECT_GT(relative_error(expected(m, spec), y), 2e-2) << "the scales of the test change nothing";
  const Choices c = m.choices();
  for (int64_t t = 0; t < 17; ++t) {
    const Guarded one = result_of(runner, slice(m.x, t, 1), {c.ids + t * 3, c.weights + t * 3, 1, 3});
    EXPECT_EQ(std::memcmp(one.data(), y.as<uint16_t>() + t * Mixture::kHidden, 2 * Mixture::kHidden), 0)
        << "token " << t << " depends on others";
  }
}

TEST(MoeRunner, ALoadOfOneExpertOrOfNoneIsALoadToo) {
  Mixture m(9, 2, 5);
  MoeRunner runner = runner_of(m, "nvfp4");
  m.ids.assign(m.ids.size(), 4);  // both choices of every token
  EXPECT_LT(relative_error(expected(m, QuantSpec::parse("nvfp4")), result_of(runner, m.x, m.choices())), 1.5e-2);
  m.ids.assign(m.ids.size(), -1);
  const Guarded y = result_of(runner, m.x, m.choices());
  for (int64_t i = 0; i < 9 * Mixture::kHidden; ++i) ASSERT_EQ(y.as<uint16_t>()[i], 0) << "element " << i;
}

TEST(MoeRunner, BitsDependNeitherOnThreadsNorOnTheOrderInWhichExpertsRun) {
  Mixture m(64, 3, 7);
  for (size_t i = 0; i < m.ids.size() / 2; ++i) m.ids[i] = 2;  // one expert has most of the work
  MoeRunner runner = runner_of(m, "nvfp4");
  const Guarded serial = result_of(runner, m.x, m.choices());
  const Executor before = set_executor([](int64_t count, int64_t, const auto& body) {
    for (int64_t i = count; i-- > 0;) body(i, i + 1);
  });
  EXPECT_EQ(difference(serial, result_of(runner, m.x, m.choices())), "");
  set_executor([](int64_t count, int64_t, const auto& body) {
    std::vector<std::thread> threads;
    for (int64_t i = 0; i < count; ++i) threads.emplace_back([&, i] { body(i, i + 1); });
    for (std::thread& t : threads) t.join();
  });
  for (int round = 0; round < 5; ++round)
    EXPECT_EQ(difference(serial, result_of(runner, m.x, m.choices())), "") << "round " << round;
  set_executor(before);
}

TEST(MoeRunner, ATokensResultDoesNotDependOnTheOthersWhereScalesAreItsOwn) {
  const Mixture m(17, 3, 3);
  MoeRunner runner = runner_of(m, "nvfp4:row_scaled");
  const Guarded all = result_of(runner, m.x, m.choices());
  const Choices c = m.choices();
  for (int64_t t = 0; t < 17; ++t) {
    const Guarded one = result_of(runner, slice(m.x, t, 1), {c.ids + t * 3, c.weights + t * 3, 1, 3});
    EXPECT_EQ(std::memcmp(one.data(), all.as<uint16_t>() + t * Mixture::kHidden, 2 * Mixture::kHidden), 0)
        << "token " << t;
  }
}

TEST(MoeRunner, ExpertsThatDoNotFitEachOtherAreRefused) {
  const Mixture m(1, 1, 1);
  const QuantSpec spec = QuantSpec::parse("nvfp4");
  const auto refused = [&](const PreparedWeight& w13, const PreparedWeight& w2, std::string_view f) -> std::string {
    try {
      MoeRunner({w13, w2}, {.x = spec, .activation = Activation::parse(f)});
    } catch (const Error& e) {
      return e.what();
    }
    return "accepted";
  };
  const WeightOptions all{.count = Mixture::kExperts};
  const PreparedWeight w13(m.w13, spec, all), w2(m.w2, spec, all);
  EXPECT_EQ(refused(w13, w2, "gelu"),
            "runner: an expert's weights must be w13 [1 * I, H] and w2 [H, I] for gelu; got [80, 48] and [48, 40] for "
            "the experts");
  const PreparedWeight fewer(slice(m.w2, 0, 3 * Mixture::kHidden), spec, {.count = 3});
  EXPECT_EQ(refused(w13, fewer, "swiglu"), "runner: w13 and w2 must have as many experts, got 6 and 3 for the experts");
  EXPECT_EQ(refused(w13, w2, "swiglu"), "accepted");
}

TEST(MoeRunner, ASharedExpertThatDoesNotFitIsRefused) {
  const Mixture m(1, 1, 1);
  const QuantSpec spec = QuantSpec::parse("nvfp4");
  const auto refused = [&](InputShape w13, InputShape w2) -> std::string {
    const Input a(w13, DType::bf16, Kind::normal, 1), b(w2, DType::bf16, Kind::normal, 2);
    try {
      MoeRunner(experts_of(m.w13, m.w2, Mixture::kExperts, spec),
                {.x = spec, .activation = Activation::parse("swiglu")},
                Experts{PreparedWeight(a, spec), PreparedWeight(b, spec)});
    } catch (const Error& e) {
      return e.what();
    }
    return "accepted";
  };
  EXPECT_EQ(refused({32, 48}, {48, 16}), "accepted");
  EXPECT_EQ(refused({32, 64}, {64, 16}), "runner: the shared expert must have the experts' H, 48; got 64");
  EXPECT_NE(refused({24, 48}, {48, 16}).find("[24, 48] and [48, 16] for the shared expert"), std::string::npos);
}

// ---------------------------------------------------------------- weights

TEST(PreparedWeight, IsACopyWhicheverWayItIsMade) {
  const QuantSpec spec = QuantSpec::parse("nvfp4");
  const Input x({5, 48}, DType::bf16, Kind::normal, 1);
  Input w({32, 48}, DType::bf16, Kind::normal, 2);
  std::vector<float> bias(32);
  for (size_t i = 0; i < bias.size(); ++i) bias[i] = static_cast<float>(i) - 7.5f;
  Quantized q = quantized(active_runner(), spec, w, {.directions = {true, false}});
  const Vector b{bias.data(), DType::f32};
  LinearRunner from_values({w, spec, {.bias = b}}, spec);
  LinearRunner from_codes(PreparedWeight(q.operand(Direction::rowwise), {.bias = b}), spec);
  Guarded expected_y(5 * 32 * 2), y(5 * 32 * 2);
  const Quantized xq = quantized(active_runner(), spec, x, {.directions = {true, false}});
  gemm({.a = xq.operand(Direction::rowwise),
        .b = q.operand(Direction::rowwise),
        .out = {expected_y.data(), DType::bf16, 5, 32, 32},
        .bias = bias.data()});
  std::memset(q.side(Direction::rowwise).data.data(), 0, static_cast<size_t>(q.side(Direction::rowwise).data.size()));
  std::fill(bias.begin(), bias.end(), 0.0f);
  for (LinearRunner* runner : {&from_values, &from_codes}) {
    runner->run({.x = x, .out = {y.data(), DType::bf16, 5, 32, 32}});
    EXPECT_EQ(difference(expected_y, y), "");
  }
}

TEST(PreparedWeight, IsDecodedForInputsThatAreNotQuantized) {
  const QuantSpec spec = QuantSpec::parse("nvfp4");
  const Input x({5, 48, 3}, DType::bf16, Kind::normal, 7), w({32, 48}, DType::bf16, Kind::normal, 8);
  Guarded weights(32 * 48 * 2), out(5 * 32 * 2), expected(5 * 32 * 2);
  const std::vector<float> values = decoded(w, spec);
  for (size_t i = 0; i < 32 * 48; ++i) store_element(weights.data(), DType::bf16, static_cast<int64_t>(i), values[i]);
  const auto at = [](const void* p, int64_t i) -> double { return load_element(p, DType::bf16, i); };
  const Matrix rows = x;
  for (int64_t i = 0; i < 5 * 32; ++i) {
    double sum = 0;
    for (int64_t k = 0; k < 48; ++k)
      sum += at(rows.data, i / 32 * rows.row_stride + k) * at(weights.data(), i % 32 * 48 + k);
    store_element(expected.data(), DType::bf16, i, static_cast<float>(sum));
  }
  LinearRunner({w, spec}, InputSpec::parse("none")).run({.x = x, .out = {out.data(), DType::bf16, 5, 32, 32}});
  EXPECT_EQ(std::memcmp(out.data(), expected.data(), 5 * 32 * 2), 0);
}

TEST(PreparedWeight, WhatCannotBeAWeightIsRefused) {
  const auto refused = [](auto&& make) -> std::string {
    try {
      make();
    } catch (const Error& e) {
      return e.what();
    }
    return "accepted";
  };
  const QuantSpec spec = QuantSpec::parse("nvfp4");
  const Input w({32, 48}, DType::bf16, Kind::normal, 2), none({0, 48}, DType::bf16, Kind::normal, 2);
  EXPECT_NE(refused([&] { PreparedWeight(none, spec); }).find("at least one of each; got [0, 48]"), std::string::npos);
  for (const int64_t count : {0, 5})
    EXPECT_EQ(refused([&] { PreparedWeight(w, spec, {.count = count}); }),
              text("runner: 32 rows do not make ", count,
                   " weights of one size; give a row for each output feature of each"));
  EXPECT_EQ(refused([&] { PreparedWeight(w, spec, {.count = 4, .input_scales = {1, 2, 3}}); }),
            "runner: there is one input_scale, or one for each of 4 weights; got 3");
  EXPECT_EQ(refused([&] { PreparedWeight(Operand{.spec = spec, .outer = 32, .contraction = 48}, {.count = 4}); }),
            "runner: each of 4 weights has a side; got 0");
  EXPECT_EQ(refused([&] { LinearRunner({w, spec, {.count = 4}}, spec); }),
            "runner: a linear runner has one weight, got 4");
  EXPECT_NE(refused([&] { PreparedWeight(w, QuantSpec::parse("nvfp4:sr")); }).find("rounds stochastically"),
            std::string::npos);
  EXPECT_NE(refused([&] { LinearRunner({w, spec}, QuantSpec::parse("nvfp4:sr")); }).find("activation spec"),
            std::string::npos);
  EXPECT_NE(refused([&] { LinearRunner({w, spec}, QuantSpec::parse("nvfp4:interleaved")); }).find("is for weights"),
            std::string::npos);
  for (const float scale : {0.0f, -1.0f, std::nanf(""), HUGE_VALF})
    EXPECT_NE(refused([&] {
                PreparedWeight(w, spec, {.input_scales = {scale}});
              }).find("an input_scale must be positive and finite; got "),
              std::string::npos)
        << scale;
  const auto under = [&](std::string_view x, float scale) {
    return refused([&] { LinearRunner({w, spec, {.input_scales = {scale}}}, QuantSpec::parse(x)); });
  };
  EXPECT_NE(under("nvfp4", 3e38f).find("2688 times an input_scale must be positive and finite; got "),
            std::string::npos);
  for (const std::string_view x : {"fp8_tensor", "nvfp4:global=mul", "nvfp4:global=div"})
    EXPECT_EQ(under(x, 3e38f), "accepted") << "stored as it is";
  for (const std::string_view x : {"nvfp4:row_scaled", "mxfp8", "fp8_row", "fp8_tensor:pow2"})
    EXPECT_EQ(under(x, 0.5f), text("runner: an input_scale is one of activations with one scale of the tensor; got x=",
                                   x, "; leave the input_scale out, or take x=nvfp4 or x=fp8_tensor"));
  EXPECT_NE(refused([&] {
              LinearRunner({w, spec}, QuantSpec::parse("fp8_tensor:given"));
            }).find("has its scale from the caller, and there is no input_scale"),
            std::string::npos);
  EXPECT_EQ(refused([&] { LinearRunner({w, spec, {.input_scales = {0.5f}}}, InputSpec::parse("none")); }),
            "runner: an input_scale is one of activations that are quantized; got x=none; leave the input_scale out");
  EXPECT_NE(refused([&] {
              PreparedWeight(Operand{.spec = spec, .outer = 32, .contraction = 48});
            }).find("rowwise_data of the weight is a null pointer; give 768 bytes"),
            std::string::npos);
  EXPECT_NE(refused([&] {
              PreparedWeight(Operand{.spec = spec, .direction = Direction::columnwise, .outer = 32, .contraction = 48});
            }).find("got columnwise ones"),
            std::string::npos);
}

}  // namespace
}  // namespace quire::testing
