// Sizes that no memory has: the arithmetic of shapes does not wrap, and the problems of mixtures refuse them, also
// beside a size of 0, where there is nothing that could be missing.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <vector>

#include "quire/base/check.h"
#include "quire/operations/operations.h"

namespace quire::testing {
namespace {

constexpr int64_t kMost = std::numeric_limits<int64_t>::max(), kHuge = int64_t{1} << 62;
using Sizes = Shape<int64_t>;

TEST(HugeSizes, ProductsAndSumsEndAtTheLargestInteger) {
  EXPECT_EQ(times(kHuge, int64_t{4}), kMost);
  EXPECT_EQ(times(int64_t{1} << 32, int64_t{1} << 32), kMost);
  EXPECT_EQ(times(kHuge, int64_t{1}), kHuge);
  EXPECT_EQ(times(kMost, int64_t{0}), 0);
  EXPECT_EQ(plus(kMost, int64_t{15}), kMost);
  EXPECT_EQ(plus(kHuge, int64_t{15}), kHuge + 15);
  EXPECT_EQ(round_up(kMost, 128), kMost);
  EXPECT_EQ(round_up(int64_t{129}, 128), 256);
  EXPECT_EQ(product(Sizes{kHuge, 8, 0}, 0, 3), 0);
  EXPECT_EQ(product(Sizes{0, kHuge, 8}, 0, 3), 0);
}

TEST(HugeSizes, ATensorMayHaveSizesWhoseNumbersOtherThan0MakeNoMoreBytesThanAProcessorAddresses) {
  EXPECT_TRUE(is_possible(Sizes{3, 0, 70}, 4));
  EXPECT_TRUE(is_possible(Sizes{}, 4));
  EXPECT_TRUE(is_possible(Sizes{kMostBytes / 4}, 4));
  EXPECT_FALSE(is_possible(Sizes{kMostBytes / 4 + 1}, 4));
  EXPECT_FALSE(is_possible(Sizes{kHuge, 0}, 1));
  EXPECT_FALSE(is_possible(Sizes{0, kHuge}, 1));
  EXPECT_FALSE(is_possible(Sizes{int64_t{1} << 32, int64_t{1} << 32, 0}, 1));
  EXPECT_FALSE(is_possible(Sizes{-1}, 1));
  EXPECT_FALSE(is_possible(Sizes{-kHuge, -1}, 1));
}

TEST(HugeSizes, WhatGroupsStoreDoesNotWrap) {
  for (const std::string_view text : {"fp8_tensor", "fp8_row", "mxfp8:swizzled", "nvfp4", "nvfp4:rht"}) {
    const QuantSpec spec = QuantSpec::parse(text);
    for (const Direction direction : {Direction::rowwise, Direction::columnwise})
      EXPECT_EQ(grouped_counts<int64_t>(spec, {kMost, 64, 1 << 20}, direction)[0], kMost) << text;
  }
  EXPECT_EQ(RowGroups::equal(4, kHuge).rows, kMost);
}

/// The words of the refusal of a problem.
template <class Problem>
std::string refusal(const Problem& problem, void (*operation)(const Problem&, const Context&)) {
  try {
    operation(problem, host());
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

/// How a valid problem is broken, and words of the error.
template <class Problem>
struct Broken {
  std::function<void(Problem&)> breaks;
  std::string_view words;
};

template <class Problem>
void expect_refusals(const Problem& valid, const std::vector<Broken<Problem>>& table,
                     void (*operation)(const Problem&, const Context&)) {
  EXPECT_EQ(refusal(valid, operation), "accepted");
  for (size_t i = 0; i < table.size(); ++i) {
    Problem p = valid;
    table[i].breaks(p);
    const std::string words = refusal(p, operation);
    EXPECT_NE(words.find(table[i].words), std::string::npos) << "row " << i << ": " << words;
  }
}

TEST(HugeSizes, PermuteRefusesThem) {
  const std::vector<int32_t> map{1, -1, 0, 2};
  const std::vector<float> from(6);
  std::vector<float> to(12);
  const PermuteProblem valid{
      .from = {from.data(), DType::f32, 2, 3, 3}, .map = {map.data(), 2, 2}, .to = {to.data(), DType::f32, 4, 3, 3}};
  using P = PermuteProblem;
  expect_refusals<P>(
      valid,
      {
          {[](P& p) { p.to.rows = int64_t{1} << 40, p.from.cols = p.to.cols = 0; }, "rows must be fewer than 2^31"},
          {[](P& p) { p.to.rows = kHuge; }, "more bytes than int64"},
          {[](P& p) { p.to.rows = -1; }, "must not be negative"},
          {[](P& p) { p.from.cols = p.to.cols = -3; }, "must not be negative"},
          {[](P& p) { p.map.slots = kHuge; }, "more bytes than int64"},
          {[](P& p) {
             p.map.tokens = p.from.rows = 3;
             p.from.data = nullptr;
           },
           "null pointer"},
          {[](P& p) { p.map.tokens = 1; }, "a row for each of the 1 tokens"},
          {[](P& p) { p.to.cols = 2; }, "same dtype and columns"},
          {[](P& p) { p.to.dtype = DType::bf16; }, "same dtype and columns"},
      },
      permute);
}

TEST(HugeSizes, UnpermuteAndItsGradientRefuseThem) {
  const std::vector<int32_t> map{1, -1, 0, 2};
  const std::vector<float> rows(12);
  std::vector<float> tokens(6), dots(4);
  const UnpermuteProblem valid{.from = {rows.data(), DType::f32, 4, 3, 3},
                               .map = {map.data(), 2, 2},
                               .to = {tokens.data(), DType::f32, 2, 3, 3}};
  using P = UnpermuteProblem;
  expect_refusals<P>(valid,
                     {
                         {[](P& p) { p.map.tokens = p.to.rows = kHuge; }, "more bytes than int64"},
                         {[](P& p) { p.to.rows = 3; }, "a row for each of the 2 tokens"},
                         {[](P& p) { p.from.cols = 4; }, "same dtype and columns"},
                         {[](P& p) { p.from.rows = -4; }, "must not be negative"},
                     },
                     unpermute);
  using D = PermutedDotProblem;
  const D dot{.permuted = {rows.data(), DType::f32, 4, 3, 3},
              .tokens = {tokens.data(), DType::f32, 2, 3, 3},
              .map = {map.data(), 2, 2},
              .to = dots.data()};
  expect_refusals<D>(dot,
                     {
                         {[](D& p) { p.tokens.rows = 3; }, "a row for each of the 2 tokens"},
                         {[](D& p) { p.permuted.cols = 2; }, "permuted must be [4, 3]"},
                         {[](D& p) { p.map.slots = -1; }, "must not be negative"},
                     },
                     permuted_dot);
}

TEST(HugeSizes, RoutingRefusesThem) {
  const std::vector<float> logits{1, 2, 3, 4};
  std::vector<float> weights(2), gradient(4);
  std::vector<int32_t> ids(2);
  const Routing routing = Routing::parse("softmax:topk=2");
  using P = RouteProblem;
  const P valid{
      .routing = routing, .logits = {logits.data(), DType::f32, 1, 4, 4}, .weights = weights.data(), .ids = ids.data()};
  expect_refusals<P>(valid,
                     {
                         {[](P& p) { p.logits.rows = kHuge; }, "more bytes than int64"},
                         {[](P& p) { p.logits.rows = -1; }, "must not be negative"},
                         {[](P& p) { p.logits.dtype = DType::u8; }, "float32, float16 or bfloat16"},
                         {[](P& p) { p.ids = nullptr; }, "null pointer"},
                     },
                     route);
  using G = RouteGradProblem;
  const G grad{.routing = routing,
               .logits = valid.logits,
               .ids = ids.data(),
               .dweights = weights.data(),
               .dlogits = {gradient.data(), DType::f32, 1, 4, 4}};
  expect_refusals<G>(grad, {{[](G& p) { p.dlogits.cols = 3; }, "dlogits must be [1, 4]"}}, route_grad);
  using C = CapacityProblem;
  const C capacity{.ids = ids.data(), .count = 2, .num_experts = 4, .capacity = 1, .kept = ids.data()};
  expect_refusals<C>(
      capacity,
      {
          {[](C& p) { p.num_experts = kHuge; }, "num_experts must be from 1 to 1048576"},
          {[](C& p) { p.num_experts = (1 << 20) + 1; }, "num_experts must be from 1 to 1048576, got 1048577"},
          {[](C& p) { p.num_experts = 0; }, "num_experts must be from 1 to 1048576, got 0"},
          {[](C& p) { p.num_experts = -1; }, "num_experts must be from 1 to 1048576, got -1"},
          {[](C& p) { p.count = -1; }, "must not be negative"},
      },
      limit_capacity);
}

TEST(HugeSizes, ProblemsOfGroupsRefuseThem) {
  std::vector<float> x(12), sums(3);
  using P = ColumnSumProblem;
  const P valid{.x = {x.data(), DType::f32, 4, 3, 3}, .out = sums.data(), .groups = RowGroups::equal(1, 4)};
  expect_refusals<P>(
      valid,
      {
          {[](P& p) { p.groups = RowGroups::equal(2, kHuge); }, "rows"},
          {[](P& p) { p.groups.count = 2, p.out = nullptr; }, "null pointer"},
          {[](P& p) { p.groups.count = 2, p.x.cols = kHuge, p.x.rows = kHuge; }, "more bytes than int64"},
      },
      column_sum);
  using D = DequantizeProblem;
  const D decoded{.spec = QuantSpec::parse("mxfp8"),
                  .rows = 0,
                  .cols = 32,
                  .out = {nullptr, DType::f32, 0, 32, 32},
                  .groups = RowGroups::equal(2, 0)};
  expect_refusals<D>(decoded,
                     {
                         {[](D& p) { p.cols = -1; }, "must not be negative"},
                         {[](D& p) { p.cols = kMost, p.out.cols = kMost; }, "more bytes than int64"},
                     },
                     dequantize);
}

}  // namespace
}  // namespace quire::testing
