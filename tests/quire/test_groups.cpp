// Problems of groups of rows: each group is computed as a tensor of its own, and what belongs to no group is zero.
#include <algorithm>
#include <numeric>
#include <vector>

#include "grouped.h"
#include "inputs.h"
#include "quantized.h"
#include "quire/device/library.h"
#include "quire/operations/operations.h"

namespace quire::testing {
namespace {

/// Ends in 32 bits, which lists of them may also have.
Array<int32_t> narrow(const Array<int64_t>& ends) { return {ends.begin(), ends.end()}; }

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
        QuantizeProblem p{.spec = spec,
                          .x = x,
                          .rowwise = {},
                          .columnwise = {},
                          .random = {.seed = 7, .rowwise_offset = 3, .columnwise_offset = 4},
                          .groups = groups_of(kEnds)};
        flat.receive(p, direction);
        quantize(p, here());
        EXPECT_TRUE(flat.intact());
        const auto expected = one_by_one(spec, x, direction, flat);
        for (size_t i = 0; i < 3; ++i)
          EXPECT_EQ(difference(expected[i].data(), flat.memory[i].data(), flat.memory[i].size()), "") << i;
      }
}

TEST(Groups, OfInt32EndsAndGivenScalesAreTheSame) {
  const QuantSpec spec = QuantSpec::parse("fp8_tensor");
  const Input x({kRows, kCols}, DType::bf16, Kind::normal, 2);
  const Array<int32_t> ends = narrow(kEnds);
  const Array<float> scale{1, 2, 4, 0.5f};
  Flat flat(spec, kRows, kCols, std::ssize(kEnds), Direction::rowwise);
  quantize({.spec = spec,
            .x = x,
            .rowwise = flat.side,
            .columnwise = {},
            .random = {},
            .scale = scale.data(),
            .groups = {.count = 4, .rows = kRows, .ends = {ends.data(), 4, false}},
            .room = {.rowwise = flat.room}},
           here());
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
      Array<float> amax(count, -1);
      const bool rowwise = direction == Direction::rowwise;
      quire::amax({.spec = spec,
                   .x = x,
                   .rowwise = rowwise ? amax.data() : nullptr,
                   .columnwise = rowwise ? nullptr : amax.data(),
                   .groups = groups_of(kEnds)},
                  here());
      const bool per_column = !rowwise && has_amax_per_line(spec);
      EXPECT_EQ(std::count(amax.begin(), amax.end(), 0.0f), per_column ? kCols : 1);  // of what has no rows
      Flat flat(spec, kRows, kCols, std::ssize(kEnds), direction);
      QuantizeProblem p = quantization(spec, x, groups_of(kEnds));
      flat.receive(p, direction);
      (rowwise ? p.amax.rowwise : p.amax.columnwise) = amax.data();
      quantize(p, here());
      const auto expected = one_by_one(spec, x, direction, flat);
      for (size_t i = 0; i < 3; ++i)
        EXPECT_EQ(difference(expected[i].data(), flat.memory[i].data(), flat.memory[i].size()), "") << i;
    }
}

/// Both sides of groups of rows, quantized.
struct Both {
  QuantSpec spec;
  Flat rows, columns;

  Both(const QuantSpec& s, const Matrix& x, const RowGroups& groups, std::span<const Matrix> each = {})
      : spec(s),
        rows(s, groups.rows, x.cols, groups.count, Direction::rowwise),
        columns(s, groups.rows, x.cols, groups.count, Direction::columnwise) {
    QuantizeProblem p = quantization(spec, x, groups);
    rows.receive(p, Direction::rowwise);
    columns.receive(p, Direction::columnwise);
    p.each = each;
    quantize(p, here());
  }
  Operand operand(Direction d, const RowGroups& groups, int64_t cols) const {
    const Flat& flat = d == Direction::rowwise ? rows : columns;
    return {.spec = spec,
            .direction = d,
            .outer = d == Direction::rowwise ? groups.rows : cols,
            .contraction = d == Direction::rowwise ? cols : groups.rows,
            .data = flat.side.data,
            .scale = flat.side.scale,
            .amax = flat.side.amax,
            .groups = groups,
            .room = flat.room};
  }
};

TEST(Groups, AreMultipliedEachByItsOwnMatrix) {
  constexpr int64_t kOut = 24;
  const QuantSpec spec = QuantSpec::parse("mxfp8");
  const Input x({kRows, kCols}, DType::f32, Kind::normal, 6), w({4 * kOut, kCols}, DType::f32, Kind::normal, 7);
  const Input bias({4, kOut}, DType::bf16, Kind::normal, 8);
  const RowGroups groups = groups_of(kEnds), experts = RowGroups::equal(4, kOut);
  const Both xs(spec, x, groups), ws(spec, w, experts);
  std::vector<Vector> biases;
  for (int64_t e = 0; e < 4; ++e)
    biases.push_back({static_cast<const char*>(Matrix(bias).data) + e * kOut * 2, DType::bf16});
  Guarded y(kRows * kOut * 4);
  const GemmProblem p{.a = xs.operand(Direction::rowwise, groups, kCols),
                      .b = ws.operand(Direction::rowwise, experts, kCols),
                      .out = {y.data(), DType::f32, kRows, kOut, kOut},
                      .biases = biases};
  gemm(p, here());
  ASSERT_TRUE(y.intact());
  Guarded again(kRows * kOut * 4);
  GemmProblem stacked = p;  // biases one after another are those of a list
  stacked.biases = {}, stacked.bias = biases[0].data, stacked.bias_dtype = DType::bf16, stacked.out.data = again.data();
  gemm(stacked, here());
  EXPECT_EQ(difference(y.data(), again.data(), y.size()), "");
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
  const Both xs(spec, x, groups), dys(spec, dy, groups);
  for (const bool accumulate : {false, true}) {
    Array<float> dw(4 * kOut * kCols, 1), stacked = dw;
    std::vector<MutableMatrix> each;
    for (int64_t e = 0; e < 4; ++e) each.push_back({dw.data() + e * kOut * kCols, DType::f32, kOut, kCols, kCols});
    GemmProblem p{.a = dys.operand(Direction::columnwise, groups, kOut),
                  .b = xs.operand(Direction::columnwise, groups, kCols),
                  .out = {nullptr, DType::f32, 4 * kOut, kCols, kCols},
                  .addend = accumulate ? dw.data() : nullptr,
                  .outs = each};
    gemm(p, here());
    p.outs = {}, p.out.data = stacked.data(), p.addend = accumulate ? stacked.data() : nullptr;
    gemm(p, here());
    EXPECT_EQ(dw, stacked);
    const auto empty = dw.begin() + kOut * kCols;
    EXPECT_EQ(std::count(empty, empty + kOut * kCols, accumulate ? 1.0f : 0.0f), kOut * kCols);
    EXPECT_LT(std::count(dw.begin(), empty, accumulate ? 1.0f : 0.0f), kOut);
  }
}

TEST(Groups, OfAWeightThatChangedAreFoundWhereTheyHaveRows) {
  std::vector<Input> inputs;
  std::vector<Matrix> w;
  Array<int64_t> expected;
  for (uint64_t e = 0; e < 4; ++e) inputs.emplace_back(InputShape{8, 8}, DType::f32, Kind::normal, e);
  for (const Input& one : inputs) {
    w.push_back(one);
    expected.push_back(static_cast<int64_t>(fingerprint(w.back())));
  }
  FingerprintProblem p{.x = {nullptr, DType::f32, 4 * 8, 8, 8},
                       .expected = expected.data(),
                       .groups = RowGroups::equal(4, 8),
                       .each = w,
                       .only = groups_of(kEnds)};
  fingerprint(p, here());
  ++expected[1];  // of no rows
  fingerprint(p, here());
  ++expected[2];
  EXPECT_THROW(fingerprint(p, here()), Error);
}

TEST(Groups, HaveAFingerprintEachAsAMatrixOfItsOwn) {
  const Input x({kRows, kCols}, DType::bf16, Kind::normal, 14);
  Array<int64_t> found(4);
  fingerprint({.x = x, .to = found.data(), .groups = groups_of(kEnds)}, here());
  for (size_t e = 0; e < 4; ++e) EXPECT_EQ(static_cast<uint64_t>(found[e]), fingerprint(rows_of(x, e))) << e;
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
  Matmul* const before = set_matmul([](const MatmulProblem& q, const Context&) { multiplied += q.out.rows; });
  matmul(p);
  EXPECT_EQ(set_matmul(before) == nullptr, false);
  EXPECT_EQ(multiplied, 2);
  MatmulProblem wrong = p;
  wrong.transpose_b = false;
  EXPECT_THROW(matmul(wrong), Error);
}

TEST(Groups, AreActivatedAndQuantizedUnderGivenAmaxesEachAsATensorOfItsOwn) {
  const QuantSpec spec = QuantSpec::parse("nvfp4");
  const Input x({kRows, kCols}, DType::bf16, Kind::normal, 15);
  const Array<float> amax{3, 1, 2, 4};
  Flat flat(spec, kRows, kCols, 4, Direction::rowwise);
  activation({.activation = Activation::parse("relu"),
              .x = x,
              .out = {.y = {nullptr, DType::bf16, kRows, kCols, kCols},
                      .spec = spec,
                      .rowwise = flat.side,
                      .amax = {.rowwise = amax.data()}},
              .groups = groups_of(kEnds),
              .room = {.rowwise = flat.room}},
             here());
  const auto* codes = flat.memory[0].as<uint8_t>();
  for (size_t e = 0; e < 4; ++e) {
    const Matrix part = rows_of(x, e);
    Quantized alone(spec, part.rows, kCols, {true, false});
    activation({.activation = Activation::parse("relu"),
                .x = part,
                .out = {.y = {nullptr, DType::bf16, part.rows, kCols, kCols},
                        .spec = spec,
                        .rowwise = alone.view(Direction::rowwise),
                        .amax = {.rowwise = &amax[e]}}},
               here());
    const Guarded& expected = alone.side(Direction::rowwise).data;
    EXPECT_EQ(difference(expected.data(), codes, expected.size()), "") << e;
    codes += expected.size();
    EXPECT_EQ(flat.memory[2].as<float>()[e], part.rows > 0 ? amax[e] : 0) << e;
  }
}

}  // namespace
}  // namespace quire::testing
