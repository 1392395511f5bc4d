// The product of the instruction set in use against the double-precision reference, within the bound that gemm.h
// states.
#include <cmath>

#include "float_mode.h"
#include "products.h"
#include "quire/base/parallel.h"
#include "quire/operations/operations.h"

namespace quire::testing {
namespace {

constexpr Direction kDirections[] = {Direction::rowwise, Direction::columnwise};

/// Every way of storing codes and scales.
constexpr std::string_view kSpecs[] = {
    "fp8_tensor",
    "fp8_tensor:e5m2",
    "fp8_row",
    "fp8_row:e5m2",
    "fp8_block",
    "fp8_block:e5m2:128x128:pow2",
    "mxfp8",
    "mxfp8:swizzled",
    "mxfp8:e5m2:32x32:swizzled",
    "mxfp4",
    "mxfp4:swizzled",
    "nvfp4",
    "nvfp4:16x16",
    "nvfp4:swizzled",
    "nvfp4:row_scaled",
    "nvfp4:4over6=mae:256",
    "nvfp4:row_scaled:global=mul",
    "nvfp4:global=div",
    "fp8_row:interleaved",
    "fp8_block:interleaved",
    "mxfp8:interleaved",
    "mxfp4:interleaved",
    "nvfp4:16x16:interleaved",
};

constexpr ProductShape kShapes[] = {
    {1, 1, 1},    {3, 5, 7},    {17, 33, 65}, {16, 16, 32},  {33, 47, 129}, {12, 30, 200}, {50, 40, 256},
    {7, 130, 31}, {2, 64, 300}, {13, 37, 16}, {1, 200, 128}, {200, 1, 48},  {25, 31, 33},  {6, 16, 1000},
};

/// Distance between neighbouring values of a dtype, relative to the value; and the smallest step of all.
struct Resolution {
  double relative, smallest;
};
Resolution resolution(DType t) {
  return t == DType::f32   ? Resolution{0x1p-23, 0x1p-149}
         : t == DType::f16 ? Resolution{0x1p-10, 0x1p-24}
                           : Resolution{0x1p-7, 0x1p-133};
}

void expect_within_bound(const OwnedOperand& a, const OwnedOperand& b, const Epilogue& e) {
  Product expected(a.view(), b.view(), e), actual(a.view(), b.view(), e);
  expected.run(reference_runner());
  actual.run(active_runner());
  const std::vector<double> sums = magnitudes(a, b);
  const double unit = static_cast<double>(a.view().contraction + 6) * 0x1p-24;
  const Resolution r = resolution(e.out);
  for (int64_t i = 0; i < a.view().outer; ++i)
    for (int64_t j = 0; j < b.view().outer; ++j) {
      const double want = static_cast<double>(expected.at(i, j)), got = static_cast<double>(actual.at(i, j));
      const double before = sums[static_cast<size_t>(i * b.view().outer + j)] + std::fabs(expected.bias(j));
      // The output rounding may fall on either neighbour; a sum with an addend is rounded twice.
      const double after = r.relative * (std::fabs(want) + std::fabs(expected.addend(i, j))) + r.smallest;
      ASSERT_NEAR(want, got, unit * before + after) << "element " << i << ", " << j;
    }
  // Between rows nothing is written; equal patterns there, and rows compared above.
  for (int64_t i = 0; i + 1 < a.view().outer; ++i)
    for (int64_t j = b.view().outer; j < b.view().outer + e.padding; ++j)
      ASSERT_EQ(std::bit_cast<uint32_t>(expected.at(i, j)), std::bit_cast<uint32_t>(actual.at(i, j)));
}

Epilogue epilogue(uint64_t turn) {
  const std::optional<DType> biases[] = {std::nullopt, DType::f32, DType::bf16, DType::f16};
  return {.out = kFloatTypes[turn % 3],
          .bias = biases[turn % 4],
          .addend = turn % 5 == 0,
          .padding = turn % 7 == 0 ? 3 : 0};
}

TEST(GemmParity, EveryPairOfStoragesIsWithinTheBound) {
  uint64_t turn = 0;
  for (const std::string_view a_text : kSpecs)
    for (const std::string_view b_text : kSpecs)
      for (const Direction a_direction : kDirections)
        for (const Direction b_direction : kDirections)
          for (int repeat = 0; repeat < 2; ++repeat) {
            const ProductShape s = kShapes[++turn % std::size(kShapes)];
            const OwnedOperand a =
                random_operand(QuantSpec::parse(a_text), s.m, s.k, {.direction = a_direction, .seed = turn});
            const OwnedOperand b =
                random_operand(QuantSpec::parse(b_text), s.n, s.k, {.direction = b_direction, .seed = turn + 1});
            SCOPED_TRACE(product_text(a.view(), b.view()));
            expect_within_bound(a, b, epilogue(turn));
            if (HasFatalFailure()) return;
          }
}

TEST(GemmParity, EverySizeIsWithinTheBound) {
  uint64_t turn = 0;
  for (const std::string_view spec : kSpecs)
    for (const ProductShape& s : kShapes) {
      ++turn;
      const OwnedOperand a = random_operand(QuantSpec::parse(spec), s.m, s.k, {.kind = Kind::outliers, .seed = turn});
      const OwnedOperand b = random_operand(QuantSpec::parse(spec), s.n, s.k, {.seed = turn + 1});
      SCOPED_TRACE(product_text(a.view(), b.view()));
      expect_within_bound(a, b, {});
      if (HasFatalFailure()) return;
    }
}

TEST(GemmParity, OutputsOfManyRegionsAreWithinTheBound) {
  for (const std::string_view spec : {"fp8_tensor", "fp8_block", "fp8_block:128x128", "mxfp8", "mxfp4", "nvfp4"})
    for (const ProductShape& s : {ProductShape{400, 530, 33}, ProductShape{1000, 60, 64}, ProductShape{5, 1100, 40}}) {
      const OwnedOperand a = random_operand(QuantSpec::parse(spec), s.m, s.k, {.seed = 1});
      const OwnedOperand b = random_operand(QuantSpec::parse(spec), s.n, s.k, {.seed = 2});
      SCOPED_TRACE(product_text(a.view(), b.view()));
      expect_within_bound(a, b, {});
      if (HasFatalFailure()) return;
    }
}

TEST(GemmParity, ScalesWhoseProductUnderflowsKeepTheBound) {
  // 2^-112 times 1 is an ordinary float32, but the scales of both divide by the largest code once more.
  for (const std::string_view spec : kSpecs) {
    const QuantSpec parsed = QuantSpec::parse(spec);
    const Input ones({20, 50}, DType::f32, Kind::normal, 1);
    std::vector<float> tiny(20 * 50);
    for (size_t i = 0; i < tiny.size(); ++i)
      tiny[i] = load_element(Matrix(ones).data, DType::f32, static_cast<int64_t>(i)) * 0x1p-112f;
    Quantized q = quantized(reference_runner(), parsed, {tiny.data(), DType::f32, 20, 50, 50});
    const OwnedOperand a{std::make_unique<Quantized>(std::move(q)), Direction::rowwise};
    const OwnedOperand b = random_operand(parsed, 30, 50, {});
    SCOPED_TRACE(spec);
    expect_within_bound(a, b, {});
    expect_within_bound(b, a, {});
  }
}

TEST(GemmParity, TransformedColumnsAreWithinTheBound) {
  for (const std::string_view spec : {"nvfp4:rht", "nvfp4:rht=unsigned:swizzled"})
    for (const int64_t tokens : {1, 15, 16, 33, 160}) {
      const OperandOptions columns{.direction = Direction::columnwise};
      const OwnedOperand a = random_operand(QuantSpec::parse(spec), 19, tokens, columns);
      const OwnedOperand b =
          random_operand(QuantSpec::parse(spec), 34, tokens, {.direction = Direction::columnwise, .seed = 2});
      SCOPED_TRACE(product_text(a.view(), b.view()));
      expect_within_bound(a, b, {});
      if (HasFatalFailure()) return;
    }
}

TEST(GemmParity, NansReachExactlyTheOutputsOfTheReference) {
  for (const std::string_view spec : {"fp8_tensor", "fp8_tensor:e5m2", "fp8_row", "fp8_block", "mxfp8", "mxfp8:e5m2"}) {
    OwnedOperand a = random_operand(QuantSpec::parse(spec), 20, 70, {.seed = 1});
    const OwnedOperand b = random_operand(QuantSpec::parse(spec), 35, 70, {.seed = 2});
    a.tensor->side(Direction::rowwise).data.as<uint8_t>()[7 * 70 + 69] = 0x7F;
    Product expected(a.view(), b.view(), {}), actual(a.view(), b.view(), {});
    expected.run(reference_runner());
    actual.run(active_runner());
    SCOPED_TRACE(spec);
    for (int64_t i = 0; i < 20; ++i)
      for (int64_t j = 0; j < 35; ++j) {
        ASSERT_EQ(i == 7, std::isnan(expected.at(i, j)));
        ASSERT_EQ(i == 7, std::isnan(actual.at(i, j))) << i << ", " << j;
      }
  }
}

void run_backwards(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body) {
  const int64_t step = std::max<int64_t>(grain, 1);
  for (int64_t begin = (count - 1) / step * step; begin >= 0; begin -= step) body(begin, std::min(begin + step, count));
}

TEST(GemmParity, BitsDoNotDependOnHowWorkIsCut) {
  for (const std::string_view spec : kSpecs) {
    const OwnedOperand a = random_operand(QuantSpec::parse(spec), 150, 200, {.seed = 1});
    const OwnedOperand b = random_operand(QuantSpec::parse(spec), 330, 200, {.seed = 2});
    Product whole(a.view(), b.view(), {}), cut(a.view(), b.view(), {});
    whole.run(active_runner());
    const Executor before = set_executor(run_backwards);
    cut.run(active_runner());
    set_executor(before);
    EXPECT_EQ(difference(whole.out(), cut.out()), "") << spec;
  }
}

TEST(GemmParity, FlushToZeroOfAPoolsThreadsChangesNothing) {
  for (const std::string_view spec : kSpecs) {
    // Products of such numbers are subnormal.
    const QuantSpec parsed = QuantSpec::parse(spec);
    OwnedOperand operands[2];
    for (uint64_t i = 0; i < 2; ++i) {
      const Input ones({20, 50}, DType::f32, Kind::normal, i);
      std::vector<float> tiny(20 * 50);
      for (size_t j = 0; j < tiny.size(); ++j)
        tiny[j] = load_element(Matrix(ones).data, DType::f32, static_cast<int64_t>(j)) * 0x1p-66f;
      Quantized q = quantized(reference_runner(), parsed, {tiny.data(), DType::f32, 20, 50, 50});
      operands[i] = {std::make_unique<Quantized>(std::move(q)), Direction::rowwise};
    }
    Product plain(operands[0].view(), operands[1].view(), {}), flushing(operands[0].view(), operands[1].view(), {});
    plain.run(active_runner());
    const Executor before = set_executor([](int64_t count, int64_t, const auto& body) {
      const uint64_t mode = float_mode();
      set_float_mode(mode | kFlush);
      body(0, count);
      set_float_mode(mode);
    });
    flushing.run(active_runner());
    set_executor(before);
    EXPECT_EQ(difference(plain.out(), flushing.out()), "") << spec;
    EXPECT_NE(plain.at(0, 0), 0.0f) << spec;
    EXPECT_LT(std::fabs(plain.at(0, 0)), 0x1p-126f) << spec;
  }
}

}  // namespace
}  // namespace quire::testing
