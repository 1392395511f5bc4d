// Fingerprints, counters, amaxes and the scales of delayed scaling on CUDA are those of the CPU.
#include <gtest/gtest.h>

#include <limits>

#include "cuda/device_matrix.h"

namespace quire::testing {
namespace {

struct Weight {
  int64_t rows, cols, padding = 0, lead = 0;
};
constexpr std::array kWeights{Weight{1, 1},         Weight{0, 5},  Weight{5, 0},         Weight{0, int64_t{1} << 40},
                              Weight{7, 3},         Weight{7, 64}, Weight{4, 8, 8},      Weight{5, 13, 4, 3},
                              Weight{3, 128, 0, 1}, Weight{1, 7},  Weight{33, 20, 0, 2}, Weight{300, 40}};

FingerprintProblem problem_of(Twins& twins, const Weight& w, DType dtype) {
  const bool huge = w.cols > 1 << 20;
  Matrix x = on_device(twins, {w.rows, huge ? 1 : w.cols, w.padding, w.lead}, dtype == DType::u8 ? DType::bf16 : dtype,
                       Kind::wide, static_cast<uint64_t>(w.cols));
  if (huge) x.cols = x.row_stride = w.cols;
  if (dtype == DType::u8) x.dtype = dtype, x.row_stride *= 2;
  return {.x = x, .to = twins.room<int64_t>(1)};
}

TEST(CudaFingerprint, IsThatOfTheCpu) {
  Twins twins;
  for (const Weight& w : kWeights)
    for (const DType dtype : {DType::u8, DType::f32, DType::f16, DType::bf16}) {
      SCOPED_TRACE(text("[", w.rows, ", ", w.cols, "] of ", name(dtype)));
      twins.device.clear();
      FingerprintProblem p = problem_of(twins, w, dtype);
      twins.expect_same(p, {{"fingerprint", p.to, 8}});
      p.expected = p.to, p.to = nullptr, p.what = "linear_fwd";
      twins.expect_same(p, {});
    }
}

TEST(CudaFingerprint, OfAWeightThatHasChangedIsReported) {
  Twins twins;
  FingerprintProblem p = problem_of(twins, {33, 20}, DType::f16);
  dispatch(p, host());
  p.expected = p.to, p.to = nullptr, p.what = "grouped_linear_fwd";
  static_cast<uint16_t*>(const_cast<void*>(p.x.data))[417] ^= 1;
  twins.expect_same_error(p);
  p.to = twins.room<int64_t>(1);
  twins.expect_same_error(p);
}

/// Groups of the rows of one matrix; a matrix for each; those alone that have tokens.
struct Groups {
  int64_t count;
  std::vector<int64_t> ends{}, tokens{};
  bool each = false;
};

TEST(CudaFingerprint, OfGroupsAreThoseOfTheirMatrices) {
  const std::vector<Groups> cases{{1, {5}},
                                  {3, {2, 2, 9}},
                                  {3, {0, 12, 12}, {4, 4, 9}},
                                  {4},
                                  {4, {}, {3, 3, 9, 9}},
                                  {3, {}, {}, true},
                                  {3, {}, {0, 8, 9}, true},
                                  {1, {}, {0}},
                                  {1, {}, {2}, true}};
  Twins twins;
  for (const Groups& c : cases)
    for (const bool wide : {true, false})
      for (const DType dtype : kFloatTypes) {
        SCOPED_TRACE(text("case ", &c - cases.data(), " of ", name(dtype)));
        twins.device.clear();
        const auto ends = [&](const std::vector<int64_t>& v) -> Integers {
          if (v.empty()) return {};
          if (wide) return {twins.array(v), std::ssize(v), true};
          return {twins.array(std::vector<int32_t>(v.begin(), v.end())), std::ssize(v), false};
        };
        std::vector<Matrix> each;
        for (int64_t e = 0; c.each && e < c.count; ++e)
          each.push_back(on_device(twins, {12 / c.count, 10, e, e}, dtype, Kind::wide, static_cast<uint64_t>(e)));
        FingerprintProblem p{.x = on_device(twins, {12, 10, 2}, dtype, Kind::wide, 9),
                             .to = twins.array(std::vector<int64_t>(static_cast<size_t>(c.count), 77)),
                             .what = "grouped_linear_fwd",
                             .groups = {.count = c.count, .rows = 12, .ends = ends(c.ends), .what = "the weight"},
                             .each = each};
        if (c.each) p.x.data = nullptr, p.x.row_stride = 10;
        twins.expect_same(p, {{"fingerprints", p.to, c.count * 8}});
        p.expected = p.to, p.to = nullptr;
        if (!c.tokens.empty()) p.only = {.count = c.count, .rows = 9, .ends = ends(c.tokens), .what = "m_splits"};
        twins.expect_same(p, {});
        // A group that has changed and is left out is not compared.
        const bool compared = c.tokens.empty() || c.tokens[0] > 0;
        const_cast<int64_t*>(p.expected)[0] ^= 1;
        if (compared)
          twins.expect_same_error(p);
        else
          twins.expect_same(p, {});
      }
}

TEST(CudaFingerprint, EndsThatBreakTheirRuleAreReported) {
  Twins twins;
  for (const bool of_only : {false, true}) {
    twins.device.clear();
    FingerprintProblem p{.x = on_device(twins, {12, 10}, DType::f32, Kind::normal, 1), .to = twins.room<int64_t>(3)};
    RowGroups broken{.count = 3, .rows = 12, .ends = {twins.array<int64_t>({4, 3, 12}), 3, true}, .what = "m_splits"};
    p.groups = of_only ? RowGroups::equal(3, 4) : broken;
    if (of_only) p.only = broken, p.expected = twins.array<int64_t>({1, 2, 3});
    twins.expect_same_error(p);
  }
}

TEST(CudaState, ACounterGoesOnAfterItsLastValue) {
  Twins twins;
  for (const int64_t value : {int64_t{0}, int64_t{-1}, int64_t{41}, std::numeric_limits<int64_t>::max()}) {
    const AdvanceProblem p{.value = twins.array<int64_t>({value})};
    twins.expect_same(p, {{"value", p.value, 8}});
  }
}

TEST(CudaState, MaximaIgnoreNan) {
  Twins twins;
  for (const int64_t count : {0, 1, 5, 300})
    for (const Kind kind : {Kind::special, Kind::wide, Kind::zeros, Kind::nans}) {
      const auto floats = [&](uint64_t seed) {
        return static_cast<float*>(on_device(twins, {1, count}, DType::f32, kind, seed).data);
      };
      const MaximumProblem p{.to = floats(1), .values = floats(2), .count = count};
      twins.expect_same(p, {{"maxima", p.to, count * 4, DType::f32}});
    }
}

TEST(CudaState, AmaxesOfACallJoinThoseOfTheState) {
  Twins twins;
  for (const int64_t count : {0, 1, 7, 200})
    for (const bool of_w : {true, false}) {
      const auto floats = [&](int64_t n, uint64_t seed) {
        return static_cast<float*>(on_device(twins, {1, n}, DType::f32, Kind::special, seed).data);
      };
      CollectProblem p{.amax = floats(2 * count, 1), .of_x = floats(count, 2), .of_w = nullptr, .count = count};
      if (of_w) p.of_w = floats(count, 3);
      p.number = twins.array<int64_t>({3}), p.rule = twins.array<int64_t>({9});
      twins.expect_same(p, {{"amaxes", p.amax, count * 8, DType::f32}, {"number", p.number, 8}});
    }
}

/// States of several sizes, of rules that the table has and has not.
class States {
 public:
  /// `rows`: of each history; 0: drawn.
  States(Twins& twins, int64_t count, uint64_t seed, int64_t rows = 0) : random_(seed) {
    for (int64_t i = 0; i < count; ++i) add(twins, rows);
  }
  DelayedUpdateProblem problem(Twins& twins, std::vector<double> rules, bool backward) const {
    DelayedUpdateProblem p{.states = states_};
    p.rule_count = std::ssize(rules) / kRuleColumns;
    p.rules = twins.array(rules);
    p.backward = backward;
    return p;
  }
  std::vector<Written> written() const {
    std::vector<Written> all;
    for (const DelayedState& s : states_) {
      all.push_back({"history", s.history, s.rows * s.slots * 4, DType::f32});
      all.push_back({"scale", s.scale, s.slots * 4, DType::f32});
      all.push_back({"amax", s.amax, s.slots * 4, DType::f32});
      all.push_back({"usage", s.usage, 24});
    }
    return all;
  }
  DelayedState& operator[](size_t i) { return states_[i]; }

 private:
  void add(Twins& twins, int64_t rows) {
    DelayedState s;
    s.rows = rows ? rows : 1 + static_cast<int64_t>(random_.below(20));
    s.slots = std::array<int64_t, 5>{1, 2, 3, 40, 300}[random_.below(5)];
    s.history = amaxes(twins, s.rows * s.slots), s.scale = amaxes(twins, s.slots), s.amax = amaxes(twins, s.slots);
    s.reduced = random_.below(2) ? s.amax : amaxes(twins, s.slots);
    const auto integer = [&](uint64_t n) { return static_cast<int64_t>(random_.below(n)); };
    s.usage = twins.array<int64_t>({integer(5), integer(24), integer(24)});
    states_.push_back(s);
  }
  float* amaxes(Twins& twins, int64_t count) {
    constexpr std::array special{0.0f, -0.0f, NAN, INFINITY, 1e-40f, 3e38f, 448.0f};
    std::vector<float> values(static_cast<size_t>(count));
    for (float& v : values)
      v = random_.below(3) ? static_cast<float>(random_.uniform()) * 10 : special[random_.below(special.size())];
    return twins.array(values);
  }

  Random random_;
  std::vector<DelayedState> states_;
};

// Columns: RuleColumn. The last row ends the table.
const std::vector<double> kTable{1,  1,   0,   0, 448, 57344, 2, 1, 1, 3, 448, 448, 3, 1,   0,
                                 -2, 240, 448, 0, 0,   0,     0, 0, 0, 4, 1,   0,   0, 448, 448};

TEST(CudaState, StepsOfDelayedScalingEndAsOnTheCpu) {
  Twins twins;
  for (uint64_t seed = 0; seed < 12; ++seed)
    for (const bool backward : {false, true}) {
      twins.device.clear();
      // More states than fit into the parameters of one kernel.
      States states(twins, std::array<int64_t, 4>{0, 1, 5, 90}[seed % 4], seed);
      std::vector<double> rules = kTable;
      twins.expect_same(states.problem(twins, rules, backward), states.written());
    }
}

TEST(CudaState, StepsOfDelayedScalingUseAsManyRowsAsTheirRuleSays) {
  Twins twins;
  for (uint64_t seed = 0; seed < 24; ++seed) {
    twins.device.clear();
    States states(twins, 1, seed);
    std::vector<double> rules{7,
                              1.0 + static_cast<double>(seed % static_cast<uint64_t>(states[0].rows)),
                              static_cast<double>(seed % 2),
                              static_cast<double>(seed) * 100 - 1100,
                              448,
                              448};
    states[0].usage[0] = 7;
    const auto p = states.problem(twins, rules, seed % 3 == 0);
    for (int step = 0; step < 3; ++step) twins.expect_same(p, states.written());
  }
}

/// More rows than a warp reads at a time, and as many.
TEST(CudaState, StepsOfDelayedScalingRollLongHistories) {
  Twins twins;
  for (const double length : {1024.0, 1025.0, 1026.0, 33.0, 2100.0})
    for (const bool most_recent : {false, true}) {
      twins.device.clear();
      States states(twins, 1, static_cast<uint64_t>(length), 2100);
      states[0].usage[0] = 7, states[0].usage[1] = 1500;
      const std::vector<double> rules{7, length, most_recent ? 1.0 : 0.0, 0, 448, 448};
      const auto p = states.problem(twins, rules, false);
      for (int step = 0; step < 2; ++step) twins.expect_same(p, states.written());
    }
}

TEST(CudaState, ALengthThatAHistoryDoesNotHaveIsReportedAndNothingChanges) {
  Twins twins;
  for (const double length : {0.0, -3.0, 21.0, 0.5, static_cast<double>(NAN), 1e300}) {
    twins.device.clear();
    States states(twins, 5, 3);
    for (size_t i = 0; i < 5; ++i) states[i].usage[0] = 1;
    states[3].usage[0] = 2;
    std::vector<double> rules = kTable;
    rules[kRuleColumns + kLength] = length;
    const auto p = states.problem(twins, rules, false);
    std::vector<std::string> before;
    for (const Written& one : states.written()) before.push_back(one.contents());
    twins.expect_same_error(p);
    size_t i = 0;
    for (const Written& one : states.written()) EXPECT_EQ(one.contents(), before[i++]) << one.what;
  }
}

}  // namespace
}  // namespace quire::testing
