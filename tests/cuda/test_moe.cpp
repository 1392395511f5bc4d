// Routing and the order of rows on CUDA give the bytes of the CPU.
#include <gtest/gtest.h>

#include <numeric>

#include "cuda/device_matrix.h"
#include "quire/spec/router.h"

namespace quire::testing {
namespace {

constexpr std::array kRoutings{"softmax:topk=2",
                               "softmax:topk=3:renormalize",
                               "softmax:topk=24",
                               "softmax:topk=3:after_topk:scaling_factor=0.5",
                               "softmax:topk=4:after_topk:num_groups=4:group_topk=2",
                               "softmax:topk=6:num_groups=8:group_topk=3:group_best=1:scaling_factor=16",
                               "sigmoid:topk=1",
                               "sigmoid:topk=4:renormalize:num_groups=6:group_topk=3:group_best=2",
                               "sqrtsoftplus:topk=3:renormalize",
                               "sqrtsoftplus:topk=24:scaling_factor=2.5"};
const float* floats_of(Twins& twins, const InputShape& shape, Kind kind, uint64_t seed) {
  return static_cast<const float*>(on_device(twins, shape, DType::f32, kind, seed).data);
}

constexpr std::array kLogits{Kind::normal, Kind::special, Kind::ties, Kind::huge, Kind::zeros, Kind::nans, Kind::wide};

/// The kernels of routing by their names: all but the last one refuse some problems.
constexpr std::array kRouters{"warp", "reference"};

TEST(CudaRoute, ChoosesAndWeighsAsTheCpu) {
  Twins twins;
  uint64_t seed = 0;
  for (const char* text : kRoutings)
    for (const DType dtype : kFloatTypes)
      for (const Kind kind : kLogits)
        for (const char* kernel : kRouters) {
          SCOPED_TRACE(quire::text(text, " of ", name(dtype), " ", kKindNames[static_cast<size_t>(kind)]));
          twins.device.clear();
          twins.kernel = kernel;
          const Routing r = Routing::parse(text);
          const int64_t tokens = 1 + static_cast<int64_t>(seed % 3) * 67, entries = tokens * r.topk;
          const MutableMatrix logits = on_device(twins, {tokens, 24, seed % 2 ? 3 : 0}, dtype, kind, seed);
          RouteProblem p{.routing = r, .logits = logits, .bias = nullptr};
          p.weights = twins.room<float>(entries), p.ids = twins.room<int32_t>(entries);
          if (seed / 2 % 2) p.bias = floats_of(twins, {1, 24}, Kind::ties, seed);
          twins.expect_same(p, {{"weights", p.weights, entries * 4, DType::f32}, {"ids", p.ids, entries * 4}});
          RouteGradProblem grad{.routing = r, .logits = logits, .ids = p.ids, .dlogits = {}};
          grad.dweights = floats_of(twins, {tokens, r.topk}, seed % 4 ? Kind::normal : Kind::special, seed);
          grad.dlogits = on_device(twins, {tokens, 24, seed % 5 ? 0 : 4}, dtype, Kind::normal, seed);
          twins.expect_same(grad, {written("dlogits", grad.dlogits)});
          ++seed;
        }
}

TEST(CudaRoute, TakesAnyNumberOfTokensAndExperts) {
  struct Sizes {
    int64_t tokens, experts;
    const char* routing;
    bool by_warps = true;
  };
  constexpr std::array sizes{Sizes{0, 5, "sigmoid:topk=2"},
                             Sizes{5000, 5, "sigmoid:topk=2"},  // more than threads that have memory
                             Sizes{3, 1, "softmax:topk=1"},
                             Sizes{9, 32, "softmax:topk=32:renormalize"},
                             Sizes{9, 33, "softmax:topk=17:after_topk"},
                             Sizes{5, 256, "sigmoid:topk=8:renormalize:num_groups=8:group_topk=4:scaling_factor=2.5"},
                             Sizes{5, 160, "softmax:topk=6:num_groups=40:group_topk=3:group_best=1"},
                             Sizes{5, 1530, "softmax:topk=6:num_groups=6:group_topk=2"},
                             Sizes{5, 40, "softmax:topk=33", false},
                             Sizes{3, 1537, "softmax:topk=4:renormalize", false}};
  Twins twins;
  for (const Sizes& c : sizes) {
    SCOPED_TRACE(text(c.tokens, " tokens, ", c.experts, " experts, ", c.routing));
    twins.device.clear();
    RouteProblem p{.routing = Routing::parse(c.routing),
                   .logits = on_device(twins, {c.tokens, c.experts}, DType::bf16, Kind::normal, 1)};
    const int64_t entries = c.tokens * p.routing.topk;
    p.weights = twins.room<float>(entries), p.ids = twins.room<int32_t>(entries);
    EXPECT_EQ(explain_choice(p, twins.device).starts_with("warp: runs"), c.by_warps);
    twins.expect_same(p, {{"weights", p.weights, entries * 4}, {"ids", p.ids, entries * 4}});
    RouteGradProblem grad{.routing = p.routing, .logits = p.logits, .ids = p.ids, .dweights = p.weights, .dlogits = {}};
    grad.dlogits = on_device(twins, {c.tokens, c.experts}, DType::bf16, Kind::normal, 2);
    EXPECT_EQ(explain_choice(grad, twins.device).starts_with("warp: runs"), c.by_warps);
    twins.expect_same(grad, {written("dlogits", grad.dlogits)});
  }
}

/// Ids for the gradients of 40 tokens, two each.
RouteGradProblem gradient_of(Twins& twins, const char* routing, const std::vector<int32_t>& ids) {
  RouteGradProblem p{.routing = Routing::parse(routing),
                     .logits = on_device(twins, {40, 7}, DType::f32, Kind::normal, 1),
                     .dlogits = on_device(twins, {40, 7}, DType::f32, Kind::normal, 2)};
  p.ids = twins.array(ids), p.dweights = floats_of(twins, {40, 2}, Kind::normal, 3);
  return p;
}

TEST(CudaRoute, OfAnExpertThatIsNamedTwiceTheLastWeightHasTheGradient) {
  Twins twins;
  for (const char* kernel : kRouters)
    for (const char* routing : {"softmax:topk=2:renormalize", "softmax:topk=2:after_topk", "sigmoid:topk=2"}) {
      twins.device.clear();
      twins.kernel = kernel;
      std::vector<int32_t> ids(80);
      for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i / 2 % 7);
      const RouteGradProblem p = gradient_of(twins, routing, ids);
      twins.expect_same(p, {written("dlogits", p.dlogits)});
    }
}

TEST(CudaRoute, IdsThatRouteDidNotReturnAreReported) {
  Twins twins;
  for (const char* kernel : kRouters)
    for (const int32_t wrong : {-1, -2, 7, 1 << 30}) {
      twins.device.clear();
      twins.kernel = kernel;
      std::vector<int32_t> ids(80);
      for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i % 7);
      ids[53] = wrong;
      twins.expect_same_error(gradient_of(twins, "softmax:topk=2", ids));
    }
}

TEST(CudaRoute, TheOrderOfWarpsIsThatOfTheRule) {
  const std::vector<float> values{NAN,    -NAN,    INFINITY, -INFINITY, 0.0f,  -0.0f,
                                  1e-45f, -1e-45f, 1.0f,     -1.0f,     3e38f, -3e38f};
  for (const float a : values) {
    EXPECT_NE(order_of(a), 0u);
    for (const float b : values) EXPECT_EQ(order_of(a) > order_of(b), exceeds(a, b)) << a << " and " << b;
  }
}

struct Choices {
  int64_t count, experts;
  bool skewed = false;  ///< most choose the first expert
};
constexpr std::array kChoices{Choices{0, 3},      Choices{1, 1},          Choices{31, 7},   Choices{33, 7, true},
                              Choices{1000, 300}, Choices{4100, 9, true}, Choices{513, 33}, Choices{300, 1000}};

std::vector<int32_t> ids_of(const Choices& c, uint64_t seed) {
  Random random(seed);
  std::vector<int32_t> ids(static_cast<size_t>(c.count));
  for (int32_t& id : ids)
    id = c.skewed && random.below(4) ? 0 : static_cast<int32_t>(random.below(static_cast<uint64_t>(c.experts) + 1)) - 1;
  return ids;
}

/// The kernels that rank places by their names.
constexpr std::array kRankers{"block", "reference"};

TEST(CudaRows, AreSortedByExpertStably) {
  Twins twins;
  for (const Choices& c : kChoices)
    for (const char* kernel : kRankers)
      for (const bool known : {true, false}) {
        if (kernel == kRankers[0] && (!known || c.experts > 512)) continue;
        SCOPED_TRACE(text(c.count, " places of ", c.experts, known ? " experts" : " experts, which nobody says"));
        twins.device.clear();
        twins.kernel = kernel;
        ExpertRowsProblem p{.ids = twins.array(ids_of(c, 3)), .count = c.count};
        if (c.count > 0) p.row_map = twins.room<int32_t>(c.count);  // an empty tensor has no memory
        if (known) p.offsets = twins.room<int32_t>(c.experts), p.num_experts = c.experts;
        twins.expect_same(p, {{"row_map", p.row_map, c.count * 4}, {"offsets", p.offsets, known ? c.experts * 4 : 0}});
      }
}

TEST(CudaRows, AreKeptUpToACapacity) {
  Twins twins;
  for (const Choices& c : kChoices)
    for (const char* kernel : kRankers)
      for (const int64_t capacity : {int64_t{0}, int64_t{1}, c.count / c.experts + 1, int64_t{1} << 40}) {
        if (kernel == kRankers[0] && c.experts > 512) continue;
        SCOPED_TRACE(text(c.count, " places of ", c.experts, " experts, ", capacity, " each"));
        twins.device.clear();
        twins.kernel = kernel;
        CapacityProblem p{.ids = twins.array(ids_of(c, 4)), .count = c.count, .num_experts = c.experts};
        p.capacity = capacity, p.kept = twins.room<int32_t>(c.count);
        twins.expect_same(p, {{"kept", p.kept, c.count * 4}});
      }
}

TEST(CudaRows, FewAreRankedByOneBlock) {
  Twins twins;
  const auto runs = [&](int64_t count, int64_t experts) {
    const std::string why = explain_choice(CapacityProblem{.count = count, .num_experts = experts}, twins.device);
    return why.substr(0, why.find('\n'));
  };
  EXPECT_EQ(runs(8192, 512), "block: runs");
  EXPECT_EQ(runs(8193, 512), "block: takes up to 8192 places, but got 8193");
  EXPECT_EQ(runs(8192, 513), "block: takes from 1 to 512 experts, but got 513");
}

TEST(CudaRows, IdsThatAreNoExpertsAreReported) {
  Twins twins;
  for (const char* kernel : kRankers)
    for (const int32_t wrong : {-2, 9, 1 << 30}) {
      twins.device.clear();
      std::vector<int32_t> ids = ids_of({700, 9}, 5);
      ids[411] = wrong;
      ExpertRowsProblem sort{.ids = twins.array(ids), .count = 700};
      sort.row_map = twins.room<int32_t>(700);
      twins.kernel = kRankers.back();
      if (wrong != 9 && kernel == twins.kernel) twins.expect_same_error(sort);  // nobody says that there are not ten
      sort.offsets = twins.room<int32_t>(9), sort.num_experts = 9;
      twins.kernel = kernel;
      twins.expect_same_error(sort);
      CapacityProblem limit{.ids = sort.ids, .count = 700, .num_experts = 9, .capacity = 3};
      limit.kept = twins.room<int32_t>(700);
      twins.expect_same_error(limit);
    }
}

struct Chunks {
  std::vector<int64_t> sizes, order{};
  int64_t rows, align = 1;
};

ChunkRowsProblem problem_of(Twins& twins, const Chunks& c, bool wide) {
  const auto integers = [&](const std::vector<int64_t>& v) -> Integers {
    if (v.empty()) return {};
    if (wide) return {twins.array(v), std::ssize(v), true};
    return {twins.array(std::vector<int32_t>(v.begin(), v.end())), std::ssize(v), false};
  };
  ChunkRowsProblem p{.sizes = integers(c.sizes), .order = integers(c.order), .align = c.align};
  p.row_map = twins.room<int32_t>(c.rows), p.rows = c.rows;
  return p;
}

TEST(CudaRows, OfChunksMoveWithThem) {
  Twins twins;
  std::vector<int64_t> many(700), backwards(700);
  for (size_t i = 0; i < many.size(); ++i)
    many[i] = static_cast<int64_t>(i * i % 5), backwards[i] = 699 - static_cast<int64_t>(i);
  const int64_t total = std::accumulate(many.begin(), many.end(), int64_t{0});
  const std::vector<Chunks> cases{{{}, {}, 0},
                                  {{}, {}, 5},
                                  {{3, 0, 4, 1}, {}, 8},
                                  {{3, 0, 4, 1}, {2, 0, 3, 1}, 11},
                                  {{0, 0, 2, 0, 0}, {4, 3, 2, 1, 0}, 2},
                                  {{3, 0, 4, 1}, {1, 3, 0, 2}, 9, 16},
                                  {{3, 7}, {}, 10, 128},
                                  {many, backwards, total, 1},
                                  {many, backwards, total + 300, 32},
                                  {many, {}, total, 8}};
  for (const Chunks& c : cases)
    for (const bool wide : {true, false}) {
      twins.device.clear();
      const ChunkRowsProblem p = problem_of(twins, c, wide);
      twins.expect_same(p, {{"row_map", p.row_map, c.rows * 4}});
    }
}

TEST(CudaRows, ChunksThatBreakARuleAreReported) {
  Twins twins;
  std::vector<int64_t> many(600, 2);
  many[411] = -3;
  const std::vector<Chunks> cases{{{3, -1, 4}, {}, 9},
                                  {{3, 7, 4}, {}, 9},
                                  {{3, 2, 4, 1, 1}, {}, 9},
                                  {{int64_t{1} << 30, int64_t{1} << 30, 1}, {}, 9},
                                  {many, {}, 5000},
                                  {{3, 2, 1}, {0, 2, 0}, 9},
                                  {{3, 2, 1}, {0, 3, 1}, 9},
                                  {{3, 2, 1}, {0, -1, 1}, 9},
                                  {{3, 2, 1}, {}, 9, int64_t{1} << 30}};
  for (const Chunks& c : cases)
    for (const bool wide : {true, false}) {
      twins.device.clear();
      twins.expect_same_error(problem_of(twins, c, wide));
    }
}

struct RowsCase {
  int64_t tokens, slots, rows, cols, padding = 0, lead = 0;
};
constexpr std::array kRows{RowsCase{9, 3, 30, 40},        RowsCase{9, 3, 20, 64, 8}, RowsCase{5, 1, 5, 7, 2, 1},
                           RowsCase{0, 2, 4, 16},         RowsCase{4, 2, 0, 16},     RowsCase{3, 0, 4, 16},
                           RowsCase{6, 2, 12, 0},         RowsCase{2, 2, 4, 600},    RowsCase{33, 4, 132, 16},
                           RowsCase{7, 2, 14, 130, 1, 3}, RowsCase{9, 3, 30, 1096},  RowsCase{5, 2, 10, 2056, 8, 8}};

/// Some places have no row, and some tokens none at all; with few rows many.
std::vector<int32_t> map_of(const RowsCase& c, uint64_t seed) {
  Random random(seed);
  std::vector<int32_t> rows(static_cast<size_t>(c.rows)), map(static_cast<size_t>(c.tokens * c.slots), -1);
  std::iota(rows.begin(), rows.end(), 0);
  for (size_t i = 0; i < map.size() && !rows.empty(); ++i) {
    if (random.below(4) == 0 || i / static_cast<size_t>(c.slots) % 5 == 2) continue;
    const size_t at = random.below(rows.size());
    map[i] = rows[at];
    rows.erase(rows.begin() + static_cast<int64_t>(at));
  }
  return map;
}

RowMap on_device(Twins& twins, const RowsCase& c, const std::vector<int32_t>& map) {
  return {twins.array(map), c.tokens, c.slots};
}

TEST(CudaRows, MoveAndAreSummedAsOnTheCpu) {
  Twins twins;
  uint64_t seed = 0;
  for (const RowsCase& c : kRows)
    for (const DType dtype : {DType::u8, DType::f32, DType::f16, DType::bf16})
      for (const Kind kind : {Kind::normal, Kind::special, Kind::wide})
        for (const bool weighted : {false, true}) {
          const bool bytes = dtype == DType::u8;
          if (bytes && (weighted || kind != Kind::normal)) continue;
          SCOPED_TRACE(text("case ", &c - kRows.data(), " of ", name(dtype), weighted ? ", weighted" : ""));
          twins.device.clear();
          const auto matrix = [&](int64_t rows, uint64_t number) {
            // Bytes of any value: those of float32.
            const int64_t width = bytes ? 4 : 1;
            MutableMatrix m = on_device(twins, {rows, ceil_div(c.cols, width), c.padding, c.lead},
                                        bytes ? DType::f32 : dtype, bytes ? Kind::wide : kind, seed + number);
            if (bytes) m.dtype = DType::u8, m.cols = c.cols, m.row_stride *= 4;
            return m;
          };
          const RowMap map = on_device(twins, c, map_of(c, seed));
          const float* const weights = weighted ? floats_of(twins, {c.tokens, c.slots}, kind, 8) : nullptr;
          const PermuteProblem permute{
              .from = matrix(c.tokens, 1), .map = map, .weights = weights, .to = matrix(c.rows, 2)};
          twins.expect_same(permute, {written("rows", permute.to)});
          ++seed;
          if (bytes) continue;
          const UnpermuteProblem unpermute{
              .from = matrix(c.rows, 3), .map = map, .weights = weights, .to = matrix(c.tokens, 4)};
          twins.expect_same(unpermute, {written("tokens", unpermute.to)});
          PermutedDotProblem dot{.permuted = matrix(c.rows, 5), .tokens = matrix(c.tokens, 6), .map = map};
          dot.to = twins.room<float>(c.tokens * c.slots);
          twins.expect_same(dot, {{"dots", dot.to, c.tokens * c.slots * 4, DType::f32}});
        }
}

TEST(CudaRows, AMapThatBreaksARuleIsReported) {
  Twins twins;
  const RowsCase c{9, 3, 30, 40};
  for (const int32_t wrong : {-2, 30, 1 << 30, 5}) {
    twins.device.clear();
    std::vector<int32_t> rows(27);
    std::iota(rows.begin(), rows.end(), 0);
    rows[22] = wrong;
    const RowMap map = on_device(twins, c, rows);
    const auto matrix = [&](int64_t count) { return on_device(twins, {count, 40}, DType::bf16, Kind::normal, 1); };
    twins.expect_same_error(PermuteProblem{.from = matrix(9), .map = map, .to = matrix(30)});
    if (wrong == 5) continue;  // twice, which permute alone refuses
    twins.expect_same_error(UnpermuteProblem{.from = matrix(30), .map = map, .to = matrix(9)});
    PermutedDotProblem dot{.permuted = matrix(30), .tokens = matrix(9), .map = map};
    dot.to = twins.room<float>(27);
    twins.expect_same_error(dot);
  }
}

}  // namespace
}  // namespace quire::testing
