// What is asked of groups and breaks a rule is refused, and nothing has been written.
#include <gtest/gtest.h>

#include <functional>
#include <span>
#include <vector>

#include "grouped.h"
#include "inputs.h"
#include "quire/base/check.h"
#include "quire/operations/operations.h"

namespace quire::testing {
namespace {

TEST(GroupRules, WithEndsThatBreakTheRulesAreRefusedAndNothingIsWritten) {
  const QuantSpec spec = QuantSpec::parse("mxfp8");
  const Input x({kRows, kCols}, DType::f32, Kind::normal, 4);
  for (const Array<int64_t>& ends : std::vector<Array<int64_t>>{
           {5, 4, 37, 69}, {-1, 5, 37, 69}, {5, 5, 37, kRows + 1}, {5, 5, int64_t{1} << 60, 69}}) {
    Flat flat(spec, kRows, kCols, std::ssize(ends), Direction::rowwise);
    QuantizeProblem p = quantization(spec, x, groups_of(ends));
    flat.receive(p, Direction::rowwise);
    EXPECT_THROW(quantize(p), Error);
    EXPECT_TRUE(flat.untouched());
  }
}

TEST(GroupRules, InBuffersWithoutRoomAreRefusedAndNothingIsWritten) {
  const QuantSpec spec = QuantSpec::parse("mxfp8");
  const Input x({kRows, kCols}, DType::f32, Kind::normal, 5);
  for (size_t buffer = 0; buffer < 2; ++buffer) {
    Flat flat(spec, kRows, kCols, std::ssize(kEnds), Direction::rowwise);
    flat.room[buffer] = buffer == 0 ? 69 * kCols - 1 : 1;
    QuantizeProblem p = quantization(spec, x, groups_of(kEnds));
    flat.receive(p, Direction::rowwise);
    EXPECT_THROW(quantize(p), Error);
    EXPECT_TRUE(flat.untouched());
  }
}

TEST(GroupRules, OfMatricesOfOtherSizesAreRefusedAndNothingIsWritten) {
  const QuantSpec spec = QuantSpec::parse("mxfp8");
  const Input first({8, 32}, DType::f32, Kind::normal, 5), more({8, 64}, DType::f32, Kind::normal, 5);
  const std::vector<Matrix> each{first, more};
  Flat flat(spec, 16, 32, 2, Direction::rowwise);
  QuantizeProblem p = quantization(spec, {nullptr, DType::f32, 16, 32, 32}, RowGroups::equal(2, 8));
  flat.receive(p, Direction::rowwise);
  p.each = each;
  EXPECT_THROW(quantize(p), Error);
  const Array<int64_t> ends{8, 16};
  const std::vector<Matrix> same{first, first};
  p.each = same;
  p.groups = groups_of(ends, 16);
  EXPECT_THROW(quantize(p), Error);
  EXPECT_TRUE(flat.untouched());
}

TEST(GroupRules, OfPlainMatricesThatDoNotFitAreRefusedAndNothingIsWritten) {
  const Input x({kRows, kCols}, DType::f32, Kind::normal, 11), w({8, kCols}, DType::f32, Kind::normal, 12);
  const Input other({8, kCols + 1}, DType::f32, Kind::normal, 13);
  const std::vector<Matrix> each{w, w, w, other};
  std::vector<float> y(kRows * 8, 7);
  EXPECT_THROW(matmul({.a = x,
                       .b = {nullptr, DType::f32, 32, kCols, kCols},
                       .transpose_b = true,
                       .out = {y.data(), DType::f32, kRows, 8, 8},
                       .groups = groups_of(kEnds),
                       .bs = each}),
               Error);
  EXPECT_EQ(std::count(y.begin(), y.end(), 7.0f), kRows * 8);
}

TEST(GroupRules, ThatBreakARuleAreRefusedWithTheRuleAndNothingIsWritten) {
  const Input x({kRows, kCols}, DType::f32, Kind::normal, 11), w({8, kCols}, DType::f32, Kind::normal, 12);
  std::vector<float> out(kRows * kCols, 7);
  const RowGroups fewer = groups_of(kEnds, kRows - 1);
  const std::vector<Vector> two(2, Vector{out.data(), DType::f32});
  const MatmulProblem product{.a = x, .b = w, .transpose_b = true, .out = {out.data(), DType::f32, kRows, 8, 8}};
  MatmulProblem biased = product, uneven = product;
  biased.biases = two;
  uneven.groups = RowGroups::equal(kRows / 10, 10), uneven.b.rows = 9;
  const int64_t expected = 0;
  const std::vector<std::pair<std::function<void()>, std::string>> cases{
      {[&] { column_sum({.x = x, .out = out.data(), .groups = fewer}); },
       "must have the 70 rows of the matrix, got 69"},
      {[&] { column_sum({.x = x, .out = out.data(), .groups = {.count = 3, .rows = kRows}}); }, "do not make 3 equal"},
      {[&] { column_sum({.x = x, .out = out.data(), .groups = {.count = 0, .rows = kRows}}); }, "at least one group"},
      {[&] { matmul(biased); }, "a bias must be given for each of 1 groups; got 2"},
      {[&] { matmul(uneven); }, "matmul: "},
      {[&] { fingerprint({.x = x, .groups = groups_of(kEnds)}); }, "nowhere to put"},
      {[&] { fingerprint({.x = x, .expected = &expected, .groups = fewer}); }, "must have the 70 rows"},
      {[&] { reorder({.from = {.spec = QuantSpec::parse("mxfp8"), .outer = kRows, .groups = fewer}}); }, "one tensor"},
  };
  for (const auto& [run, words] : cases) {
    std::string said;
    try {
      run();
    } catch (const Error& error) {
      said = error.what();
    }
    EXPECT_NE(said.find(words), std::string::npos) << words << ": " << said;
  }
  EXPECT_EQ(std::count(out.begin(), out.end(), 7.0f), kRows * kCols);
}

}  // namespace
}  // namespace quire::testing
