// Row maps against sorting, rows moved and summed against doing it one element at a time.
#include <algorithm>
#include <cstring>
#include <vector>

#include <gtest/gtest.h>

#include "guarded.h"
#include "inputs.h"
#include "quire/base/check.h"
#include "quire/base/parallel.h"
#include "quire/operations/operations.h"

namespace quire::testing {
namespace {

constexpr int64_t kTokens = 41, kSlots = 3, kExperts = 7;

/// Choices of some load: any expert or none, one expert for all, none at all.
Array<int32_t> choices(int load) {
  Random random(static_cast<uint64_t>(load));
  Array<int32_t> ids(kTokens * kSlots);
  for (int32_t& id : ids) id = load == 0 ? -1 : load == 1 ? 3 : static_cast<int32_t>(random.below(kExperts + 1)) - 1;
  return ids;
}

/// expert_rows of these ids; offsets may be empty.
void sort_rows(const Array<int32_t>& ids, Array<int32_t>& map, Array<int32_t>& offsets) {
  expert_rows({.ids = ids.data(),
               .count = std::ssize(ids),
               .row_map = map.data(),
               .offsets = offsets.empty() ? nullptr : offsets.data(),
               .num_experts = std::ssize(offsets)},
              here());
}

Integers integers(const Array<int64_t>& v) { return {v.data(), std::ssize(v), true}; }

Array<int32_t> map_of(const Array<int32_t>& ids) {
  Array<int32_t> map(ids.size()), no_offsets;
  sort_rows(ids, map, no_offsets);
  return map;
}

TEST(Permute, RowsAreSortedByExpertStably) {
  for (int load = 0; load < 6; ++load) {
    const Array<int32_t> ids = choices(load);
    Array<int32_t> map(ids.size(), 99), offsets(kExperts), order;
    sort_rows(ids, map, offsets);
    for (size_t i = 0; i < ids.size(); ++i)
      if (ids[i] >= 0) order.push_back(static_cast<int32_t>(i));
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t a, int32_t b) { return ids[static_cast<size_t>(a)] < ids[static_cast<size_t>(b)]; });
    Array<int32_t> expected(ids.size(), -1);
    for (size_t row = 0; row < order.size(); ++row)
      expected[static_cast<size_t>(order[row])] = static_cast<int32_t>(row);
    EXPECT_EQ(map, expected);
    EXPECT_EQ(map_of(ids), expected);
    for (int32_t e = 0; e < kExperts; ++e)
      EXPECT_EQ(offsets[static_cast<size_t>(e)],
                std::count_if(ids.begin(), ids.end(), [&](int32_t id) { return id >= 0 && id <= e; }));
  }
  Array<int32_t> map(1), offsets(2), no_offsets;
  EXPECT_THROW(sort_rows({2}, map, offsets), Error);
  EXPECT_THROW(sort_rows({-2}, map, offsets), Error);
  EXPECT_THROW(sort_rows({1 << 30}, map, no_offsets), Error);
}

TEST(Permute, ChunksMoveAndArePadded) {
  const Array<int64_t> sizes{2, 0, 3}, order{2, 0, 1};
  Array<int32_t> map(7);
  const auto move = [&](const Array<int64_t>& in_order, int64_t align, Array<int32_t>& to) {
    chunk_rows({.sizes = integers(sizes),
                .order = integers(in_order),
                .align = align,
                .row_map = to.data(),
                .rows = std::ssize(to)},
               here());
  };
  move(order, 1, map);
  EXPECT_EQ(map, (Array<int32_t>{3, 4, 0, 1, 2, 5, 6}));
  move({}, 4, map);
  EXPECT_EQ(map, (Array<int32_t>{0, 1, 4, 5, 6, 8, 9}));
  Array<int32_t> few(4);
  EXPECT_THROW(move({}, 4, few), Error);
  const Array<int64_t> twice{2, 2, 1};
  EXPECT_THROW(move(twice, 4, map), Error);
}

float at(const Matrix& x, int64_t r, int64_t c) { return load_element(x.data, x.dtype, r * x.row_stride + c); }

/// Runs what is given whole and cut into pieces, backwards; both must give the same bytes.
template <class Run>
void run_both_ways(const Run& run, Guarded& whole) {
  Guarded cut(whole.size());
  run(whole);
  const Executor before = set_executor([](int64_t count, int64_t grain, const auto& body) {
    for (int64_t begin = (count - 1) / grain * grain; begin >= 0; begin -= grain)
      body(begin, std::min(begin + grain, count));
  });
  run(cut);
  set_executor(before);
  ASSERT_TRUE(whole.intact() && cut.intact());
  ASSERT_EQ(std::memcmp(whole.data(), cut.data(), static_cast<size_t>(whole.size())), 0);
}

class EveryLoad : public ::testing::TestWithParam<std::tuple<int, DType, bool, int64_t>> {};

TEST_P(EveryLoad, RowsAreMovedSummedAndMultiplied) {
  const auto& [load, dtype, weighted, cols] = GetParam();
  const Array<int32_t> rows = map_of(choices(load));
  constexpr int64_t kRows = kTokens * kSlots;
  const RowMap map{rows.data(), kTokens, kSlots};
  const Input x({kTokens, cols, 5, 1}, dtype, Kind::normal, 1), y({kRows, cols, 2}, dtype, Kind::normal, 2);
  const Input w({kTokens, kSlots}, DType::f32, Kind::normal, 3);
  const float* weights = weighted ? static_cast<const float*>(Matrix(w).data) : nullptr;
  Guarded permuted(kRows * cols * size_of(dtype)), sums(kTokens * cols * size_of(dtype)), dots(kRows * 4);
  run_both_ways([&](Guarded& to) { permute({x, map, weights, {to.data(), dtype, kRows, cols, cols}}, here()); },
                permuted);
  run_both_ways([&](Guarded& to) { unpermute({y, map, weights, {to.data(), dtype, kTokens, cols, cols}}, here()); },
                sums);
  run_both_ways([&](Guarded& to) { permuted_dot({y, x, map, to.as<float>()}, here()); }, dots);

  std::vector<float> expected(static_cast<size_t>(kRows * cols), 0.0f);
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int64_t c = 0; c < cols; ++c) {
      float sum = 0;
      bool first = true;
      for (int64_t s = 0; s < kSlots; ++s) {
        const int64_t row = rows[static_cast<size_t>(t * kSlots + s)];
        if (row < 0) continue;
        const float weight = weights ? weights[t * kSlots + s] : 1.0f, term = at(y, row, c) * weight;
        sum = first ? term : sum + term;
        first = false;
        expected[static_cast<size_t>(row * cols + c)] = at(x, t, c) * weight;
      }
      uint32_t rounded = 0;
      store_element(&rounded, dtype, 0, sum);
      ASSERT_EQ(load_element(sums.data(), dtype, t * cols + c), load_element(&rounded, dtype, 0));
    }
    for (int64_t s = 0; s < kSlots; ++s) {
      const int64_t row = rows[static_cast<size_t>(t * kSlots + s)];
      double dot = 0, magnitude = 0;
      for (int64_t c = 0; row >= 0 && c < cols; ++c) {
        dot += static_cast<double>(at(y, row, c)) * static_cast<double>(at(x, t, c));
        magnitude += std::abs(static_cast<double>(at(y, row, c)) * static_cast<double>(at(x, t, c)));
      }
      ASSERT_NEAR(static_cast<double>(dots.as<float>()[t * kSlots + s]), dot, 1e-6 * magnitude);
    }
  }
  for (int64_t i = 0; i < kRows * cols; ++i) {
    uint32_t rounded = 0;
    store_element(&rounded, dtype, 0, expected[static_cast<size_t>(i)]);
    ASSERT_EQ(load_element(permuted.data(), dtype, i), load_element(&rounded, dtype, 0));
  }
}

INSTANTIATE_TEST_SUITE_P(Loads, EveryLoad,
                         ::testing::Combine(::testing::Values(0, 1, 2, 5), ::testing::ValuesIn(kFloatTypes),
                                            ::testing::Bool(), ::testing::Values<int64_t>(0, 1, 33)));

TEST(Permute, BytesMoveAndRowsThatNobodyFillsAreZero) {
  const Array<uint8_t> x{1, 2, 3, 4};
  const Array<int32_t> map{3, -1};
  Guarded to(10);
  permute({{x.data(), DType::u8, 2, 2, 2}, {map.data(), 2, 1}, nullptr, {to.data(), DType::u8, 5, 2, 2}}, here());
  EXPECT_TRUE(to.intact());
  EXPECT_EQ(std::vector<uint8_t>(to.as<uint8_t>(), to.as<uint8_t>() + 10),
            (std::vector<uint8_t>{0, 0, 0, 0, 0, 0, 1, 2, 0, 0}));
}

TEST(Permute, MapsThatDoNotFitAreRefused) {
  const Input x({2, 4}, DType::f32, Kind::normal, 1);
  Guarded to(2 * 4 * 4);
  for (const Array<int32_t>& map : {Array<int32_t>{0, 2}, {0, -2}, {1, 1}})
    EXPECT_THROW(permute({x, {map.data(), 2, 1}, nullptr, {to.data(), DType::f32, 2, 4, 4}}, here()), Error);
  const Array<int32_t> far{0, 2};
  EXPECT_THROW(unpermute({x, {far.data(), 2, 1}, nullptr, {to.data(), DType::f32, 2, 4, 4}}, here()), Error);
  EXPECT_THROW(permuted_dot({x, x, {far.data(), 2, 1}, to.as<float>()}, here()), Error);
}

}  // namespace
}  // namespace quire::testing
