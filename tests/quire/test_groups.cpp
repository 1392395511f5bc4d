// Problems of groups of rows: each group is computed as a tensor of its own, what belongs to no group is zero, and ends
// that break the rules are refused before anything is written.
#include <algorithm>
#include <numeric>
#include <vector>

#include "inputs.h"
#include "quantized.h"
#include "quire/device/library.h"
#include "quire/groups/groups.h"
#include "quire/quantize/fingerprint.h"

namespace quire::testing {
namespace {

constexpr int64_t kRows = 70, kCols = 48;
const std::vector<int64_t> kEnds{5, 5, 37, 69};  // of 5, 0, 32 and 32 rows; one row is in no group
constexpr std::array kDirections{Direction::rowwise, Direction::columnwise};

/// Ends in 32 bits, which lists of them may also have.
std::vector<int32_t> narrow(const std::vector<int64_t>& ends) { return {ends.begin(), ends.end()}; }

RowGroups groups_of(const std::vector<int64_t>& ends, int64_t rows = kRows) {
  return {.count = std::ssize(ends), .rows = rows, .ends = {ends.data(), std::ssize(ends), true}, .what = "test"};
}

Matrix rows_of(const Matrix& m, size_t group) {
  const int64_t begin = group == 0 ? 0 : kEnds[group - 1];
  return {static_cast<const char*>(m.data) + begin * m.row_stride * size_of(m.dtype), m.dtype, kEnds[group] - begin,
          m.cols, m.row_stride};
}

/// Flat buffers of one direction of groups.
struct Flat {
  std::array<Guarded, 3> memory;
  GroupedSide side;

  Flat(const QuantSpec& spec, int64_t rows, int64_t cols, int64_t groups, Direction direction) {
    const auto counts = grouped_counts<int64_t>(spec, {rows, cols, groups}, direction);
    const int64_t scale = spec.row().scale == ScaleKind::f32 ? 4 : 1;
    memory = {Guarded(counts[0]), Guarded(counts[1] * scale), Guarded(counts[2] * 4)};
    side = {.flat = {memory[0].data(), memory[1].data(), memory[2].as<float>()}, .room = counts};
  }
  bool untouched() const {
    return std::all_of(memory.begin(), memory.end(), [](const Guarded& g) {
      const auto* bytes = g.as<uint8_t>();
      return std::all_of(bytes, bytes + g.size(), [](uint8_t b) { return b == 0xCD; });
    });
  }
  bool intact() const {
    return std::all_of(memory.begin(), memory.end(), [](auto& g) { return g.intact(); });
  }
};

/// The buffers of groups that are quantized each by itself, by the reference, one after another; then zeros.
std::array<std::vector<uint8_t>, 3> one_by_one(const QuantSpec& spec, const Matrix& x, Direction direction,
                                               const Flat& like, const float* scale = nullptr) {
  std::array<std::vector<uint8_t>, 3> all;
  for (size_t e = 0; e < kEnds.size(); ++e) {
    const QuantizeOptions options{.random = {.seed = 7 + e, .rowwise_offset = 3, .columnwise_offset = 4},
                                  .scale = scale ? scale + e : nullptr};
    Quantized q(spec, 0, x.cols);
    if (rows_of(x, e).rows > 0) q = quantized(reference_runner(), spec, rows_of(x, e), options);
    const QuantizedSide& side = q.side(direction);
    const std::array<const Guarded*, 3> parts{&side.data, &side.scale, &side.amax};
    for (size_t i = 0; i < 3; ++i) {
      const auto* bytes = parts[i]->as<uint8_t>();
      const bool empty = rows_of(x, e).rows == 0;
      for (int64_t b = 0; b < parts[i]->size(); ++b) all[i].push_back(empty ? 0 : bytes[b]);
    }
  }
  for (size_t i = 0; i < 3; ++i) all[i].resize(static_cast<size_t>(like.memory[i].size()), 0);
  return all;
}

constexpr std::array kSpecs{"fp8_tensor", "fp8_row",      "fp8_block", "fp8_block:128x128",      "mxfp8",
                            "mxfp4",      "nvfp4:rht:sr", "nvfp4",     "nvfp4:16x16:4over6=mae", "mxfp8:swizzled"};

TEST(Groups, AreQuantizedEachAsATensorOfItsOwn) {
  for (const std::string_view text : kSpecs)
    for (const DType dtype : kFloatTypes)
      for (const Direction direction : kDirections) {
        const QuantSpec spec = QuantSpec::parse(text);
        SCOPED_TRACE(quire::text(text, " ", name(dtype), direction == Direction::rowwise ? " rowwise" : " columnwise"));
        const Input x({kRows, kCols, 3}, dtype, Kind::outliers, 1);
        Flat flat(spec, kRows, kCols, std::ssize(kEnds), direction);
        GroupedQuantizeProblem p{.spec = spec,
                                 .x = {.rows = x},
                                 .groups = groups_of(kEnds),
                                 .random = {.seed = 7, .rowwise_offset = 3, .columnwise_offset = 4}};
        (direction == Direction::rowwise ? p.rowwise : p.columnwise) = flat.side;
        grouped_quantize(p);
        EXPECT_TRUE(flat.intact());
        const auto expected = one_by_one(spec, x, direction, flat);
        for (size_t i = 0; i < 3; ++i)
          EXPECT_EQ(difference(expected[i].data(), flat.memory[i].data(), flat.memory[i].size()), "") << i;
      }
}

TEST(Groups, OfInt32EndsAndGivenScalesAreTheSame) {
  const QuantSpec spec = QuantSpec::parse("fp8_tensor");
  const Input x({kRows, kCols}, DType::bf16, Kind::normal, 2);
  const std::vector<int32_t> ends = narrow(kEnds);
  const std::array<float, 4> scale{1, 2, 4, 0.5f};
  Flat flat(spec, kRows, kCols, std::ssize(kEnds), Direction::rowwise);
  grouped_quantize({.spec = spec,
                    .x = {.rows = x},
                    .groups = {.count = 4, .rows = kRows, .ends = {ends.data(), 4, false}},
                    .rowwise = flat.side,
                    .scale = scale.data()});
  const auto expected = one_by_one(spec, x, Direction::rowwise, flat, scale.data());
  for (size_t i = 0; i < 3; ++i)
    EXPECT_EQ(difference(expected[i].data(), flat.memory[i].data(), flat.memory[i].size()), "") << i;
}

TEST(Groups, UnderTheirOwnAmaxesGiveTheBytesOfMeasuring) {
  for (const std::string_view text : {"fp8_tensor", "fp8_row", "nvfp4", "nvfp4:rht", "nvfp4:row_scaled"})
    for (const Direction direction : kDirections) {
      const QuantSpec spec = QuantSpec::parse(text);
      if (spec.row_scaled && direction == Direction::columnwise) continue;
      SCOPED_TRACE(text);
      const Input x({kRows, kCols}, DType::f32, Kind::normal, 3);
      const auto count =
          static_cast<size_t>(grouped_amax_count<int64_t>(spec, {kRows, kCols, std::ssize(kEnds)}, direction));
      std::vector<float> amax(count, -1);
      const bool rowwise = direction == Direction::rowwise;
      grouped_amax({.spec = spec,
                    .x = x,
                    .groups = groups_of(kEnds),
                    .rowwise = rowwise ? amax.data() : nullptr,
                    .columnwise = rowwise ? nullptr : amax.data()});
      const bool per_column = !rowwise && has_amax_per_line(spec);
      EXPECT_EQ(std::count(amax.begin(), amax.end(), 0.0f), per_column ? kCols : 1);  // of what has no rows
      Flat flat(spec, kRows, kCols, std::ssize(kEnds), direction);
      GroupedQuantizeProblem p{.spec = spec, .x = {.rows = x}, .groups = groups_of(kEnds)};
      (rowwise ? p.rowwise : p.columnwise) = flat.side;
      (rowwise ? p.amax.rowwise : p.amax.columnwise) = amax.data();
      grouped_quantize(p);
      const auto expected = one_by_one(spec, x, direction, flat);
      for (size_t i = 0; i < 3; ++i)
        EXPECT_EQ(difference(expected[i].data(), flat.memory[i].data(), flat.memory[i].size()), "") << i;
    }
}

TEST(Groups, WithEndsThatBreakTheRulesAreRefusedAndNothingIsWritten) {
  const QuantSpec spec = QuantSpec::parse("mxfp8");
  const Input x({kRows, kCols}, DType::f32, Kind::normal, 4);
  for (const std::vector<int64_t>& ends : std::vector<std::vector<int64_t>>{
           {5, 4, 37, 69}, {-1, 5, 37, 69}, {5, 5, 37, kRows + 1}, {5, 5, int64_t{1} << 60, 69}}) {
    Flat flat(spec, kRows, kCols, std::ssize(ends), Direction::rowwise);
    EXPECT_THROW(grouped_quantize({.spec = spec, .x = {.rows = x}, .groups = groups_of(ends), .rowwise = flat.side}),
                 Error);
    EXPECT_TRUE(flat.untouched());
  }
}

TEST(Groups, InBuffersWithoutRoomAreRefusedAndNothingIsWritten) {
  const QuantSpec spec = QuantSpec::parse("mxfp8");
  const Input x({kRows, kCols}, DType::f32, Kind::normal, 5);
  for (size_t buffer = 0; buffer < 2; ++buffer) {
    Flat flat(spec, kRows, kCols, std::ssize(kEnds), Direction::rowwise);
    flat.side.room[buffer] = buffer == 0 ? 69 * kCols - 1 : 1;
    EXPECT_THROW(grouped_quantize({.spec = spec, .x = {.rows = x}, .groups = groups_of(kEnds), .rowwise = flat.side}),
                 Error);
    EXPECT_TRUE(flat.untouched());
  }
}

TEST(Groups, OfMatricesOfOtherSizesAreRefusedAndNothingIsWritten) {
  const QuantSpec spec = QuantSpec::parse("mxfp8");
  const Input first({8, 32}, DType::f32, Kind::normal, 5), more({8, 64}, DType::f32, Kind::normal, 5);
  const std::vector<Matrix> each{first, more};
  Flat flat(spec, 16, 32, 2, Direction::rowwise);
  GroupedQuantizeProblem p{.spec = spec, .x = {.each = each}, .groups = RowGroups::equal(2, 8), .rowwise = flat.side};
  EXPECT_THROW(grouped_quantize(p), Error);
  const std::vector<int64_t> ends{8, 16};
  const std::vector<Matrix> same{first, first};
  p.x.each = same;
  p.groups = groups_of(ends, 16);
  EXPECT_THROW(grouped_quantize(p), Error);
  EXPECT_TRUE(flat.untouched());
}

/// Both sides of groups of rows, quantized.
struct Both {
  QuantSpec spec;
  Flat rows, columns;

  Both(const QuantSpec& s, const Matrix& x, const RowGroups& groups, GroupedMatrix from)
      : spec(s),
        rows(s, groups.rows, x.cols, groups.count, Direction::rowwise),
        columns(s, groups.rows, x.cols, groups.count, Direction::columnwise) {
    grouped_quantize({.spec = spec, .x = from, .groups = groups, .rowwise = rows.side, .columnwise = columns.side});
  }
  GroupedOperand operand(Direction d, const RowGroups& groups, int64_t cols) const {
    return {.spec = spec,
            .direction = d,
            .groups = groups,
            .cols = cols,
            .side = d == Direction::rowwise ? rows.side : columns.side};
  }
};

TEST(Groups, AreMultipliedEachByItsOwnMatrix) {
  constexpr int64_t kOut = 24;
  const QuantSpec spec = QuantSpec::parse("mxfp8");
  const Input x({kRows, kCols}, DType::f32, Kind::normal, 6), w({4 * kOut, kCols}, DType::f32, Kind::normal, 7);
  const Input bias({4, kOut}, DType::bf16, Kind::normal, 8);
  const RowGroups groups = groups_of(kEnds), experts = RowGroups::equal(4, kOut);
  const Both xs(spec, x, groups, {.rows = x}), ws(spec, w, experts, {.rows = w});
  std::vector<Vector> biases;
  for (int64_t e = 0; e < 4; ++e)
    biases.push_back({static_cast<const char*>(Matrix(bias).data) + e * kOut * 2, DType::bf16});
  Guarded y(kRows * kOut * 4);
  grouped_gemm({.a = xs.operand(Direction::rowwise, groups, kCols),
                .b = ws.operand(Direction::rowwise, experts, kCols),
                .out = {.rows = {y.data(), DType::f32, kRows, kOut, kOut}},
                .bias = biases});
  ASSERT_TRUE(y.intact());
  for (size_t e = 0; e < 4; ++e) {
    const Matrix part = rows_of(x, e);
    if (part.rows == 0) continue;
    Matrix weight = w;
    weight.data = static_cast<const char*>(weight.data) + static_cast<int64_t>(e) * kOut * kCols * 4;
    weight.rows = kOut;
    const Quantized a = quantized(reference_runner(), spec, part), b = quantized(reference_runner(), spec, weight);
    Guarded expected(part.rows * kOut * 4);
    reference::gemm({.a = a.operand(Direction::rowwise),
                     .b = b.operand(Direction::rowwise),
                     .out = {expected.data(), DType::f32, part.rows, kOut, kOut},
                     .bias = biases[e].data,
                     .bias_dtype = DType::bf16});
    const int64_t begin = e == 0 ? 0 : kEnds[e - 1];
    for (int64_t i = 0; i < part.rows * kOut; ++i)
      ASSERT_NEAR(y.as<float>()[begin * kOut + i], expected.as<float>()[i], 1e-4f) << e << " " << i;
  }
  for (int64_t i = kEnds.back() * kOut; i < kRows * kOut; ++i) EXPECT_EQ(y.as<float>()[i], 0);
}

TEST(Groups, WithoutRowsHaveAWeightGradientOfZeroThatIsNotAdded) {
  constexpr int64_t kOut = 24;
  const QuantSpec spec = QuantSpec::parse("fp8_tensor");
  const Input x({kRows, kCols}, DType::f32, Kind::normal, 9), dy({kRows, kOut}, DType::f32, Kind::normal, 10);
  const RowGroups groups = groups_of(kEnds);
  const Both xs(spec, x, groups, {.rows = x}), dys(spec, dy, groups, {.rows = dy});
  for (const bool accumulate : {false, true}) {
    std::vector<float> dw(4 * kOut * kCols, 1);
    std::vector<MutableMatrix> each;
    for (int64_t e = 0; e < 4; ++e) each.push_back({dw.data() + e * kOut * kCols, DType::f32, kOut, kCols, kCols});
    grouped_gemm({.a = dys.operand(Direction::columnwise, groups, kOut),
                  .b = xs.operand(Direction::columnwise, groups, kCols),
                  .out = {.each = each},
                  .accumulate = accumulate});
    const auto empty = dw.begin() + kOut * kCols;
    EXPECT_EQ(std::count(empty, empty + kOut * kCols, accumulate ? 1.0f : 0.0f), kOut * kCols);
    EXPECT_LT(std::count(dw.begin(), empty, accumulate ? 1.0f : 0.0f), kOut);
  }
}

TEST(Groups, OfAWeightThatChangedAreFoundWhereTheyHaveRows) {
  std::vector<Input> inputs;
  std::vector<Matrix> w;
  std::vector<int64_t> expected;
  for (uint64_t e = 0; e < 4; ++e) inputs.emplace_back(InputShape{8, 8}, DType::f32, Kind::normal, e);
  for (const Input& one : inputs) {
    w.push_back(one);
    expected.push_back(static_cast<int64_t>(fingerprint(w.back())));
  }
  const GroupedFingerprintProblem p{.x = w, .groups = groups_of(kEnds), .expected = expected.data()};
  grouped_fingerprint(p);
  ++expected[1];  // of no rows
  grouped_fingerprint(p);
  ++expected[2];
  EXPECT_THROW(grouped_fingerprint(p), Error);
}

TEST(Groups, OfPlainMatricesThatDoNotFitAreRefusedAndNothingIsWritten) {
  const Input x({kRows, kCols}, DType::f32, Kind::normal, 11), w({8, kCols}, DType::f32, Kind::normal, 12);
  const Input other({8, kCols + 1}, DType::f32, Kind::normal, 13);
  const std::vector<Matrix> each{w, w, w, other};
  std::vector<float> y(kRows * 8, 7);
  EXPECT_THROW(grouped_matmul({.groups = groups_of(kEnds),
                               .a = {.rows = x},
                               .b = {.each = each},
                               .transpose_b = true,
                               .out = {.rows = {y.data(), DType::f32, kRows, 8, 8}}}),
               Error);
  EXPECT_EQ(std::count(y.begin(), y.end(), 7.0f), kRows * 8);
}

int64_t multiplied = 0;

TEST(Matmul, IsTheLibrarysThatAProgramLendsAndElseTheReferences) {
  const std::array<float, 6> a{1, 2, 3, 4, 5, 6}, b{1, 0, -1, 2, 2, 2};
  const std::array<float, 2> bias{10, 20};
  std::array<float, 4> out{};
  const MatmulProblem p{.a = {a.data(), DType::f32, 2, 3, 3},
                        .b = {b.data(), DType::f32, 2, 3, 3},
                        .transpose_b = true,
                        .bias = {bias.data(), DType::f32},
                        .out = {out.data(), DType::f32, 2, 2, 2}};
  matmul(p);
  EXPECT_EQ(out, (std::array<float, 4>{8, 32, 8, 50}));
  Matmul* const before = set_matmul([](const MatmulProblem& q) { multiplied += q.out.rows; });
  matmul(p);
  EXPECT_EQ(set_matmul(before) == nullptr, false);
  EXPECT_EQ(multiplied, 2);
  MatmulProblem wrong = p;
  wrong.transpose_b = false;
  EXPECT_THROW(matmul(wrong), Error);
}

TEST(Groups, OneGroupObeysTheRulesOfSeveral) {
  const Input x({kRows, kCols}, DType::f32, Kind::normal, 11), w({8, kCols}, DType::f32, Kind::normal, 12);
  const RowGroups one = RowGroups::equal(1, kRows), fewer = RowGroups::equal(1, kRows - 1);
  std::vector<float> out(kRows * kCols, 7);
  const MutableMatrix sums{out.data(), DType::f32, 1, kCols, kCols}, short_sums{out.data(), DType::f32, 1, 8, 8};
  EXPECT_THROW(grouped_column_sum({.x = x, .groups = one, .out = short_sums}), Error);
  EXPECT_THROW(grouped_column_sum({.x = x, .groups = fewer, .out = sums}), Error);
  const std::vector<Vector> two(2, Vector{out.data(), DType::f32});
  const Matrix b = w;
  EXPECT_THROW(grouped_matmul({.groups = one,
                               .a = {.rows = x},
                               .b = {.each = {&b, 1}},
                               .transpose_b = true,
                               .bias = two,
                               .out = {.rows = {out.data(), DType::f32, kRows, 8, 8}}}),
               Error);
  int64_t expected = 0;
  EXPECT_THROW(grouped_fingerprint({.x = {}, .groups = one, .expected = &expected}), Error);
  EXPECT_EQ(std::count(out.begin(), out.end(), 7.0f), kRows * kCols);
}

}  // namespace
}  // namespace quire::testing
