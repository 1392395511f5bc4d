// Products by tensor cores: within the bound that numerics.md 7.5 gives for them. The emulator adds as coarsely as the
// bound takes for granted.
#include <iostream>

#include "cuda/grammar.h"
#include "cuda/product_recipes.h"
#include "cuda/tensor_case.h"

namespace quire::testing {
namespace {

constexpr std::array<std::string_view, 2> kTensorRows{"decode", "pipelined_bf16"};

/// The same of each row that takes the problem, from what outputs are now.
void expect_within(ProductCases& cases, const GemmProblem& p, const Output& o) {
  auto* const begin = static_cast<char*>(o.out.data);
  const std::string before(begin, static_cast<size_t>(o.bytes));
  for (const std::string_view row : kTensorRows) {
    const auto& rows = kernels<GemmProblem>(cases.twins().device);
    const auto found = std::ranges::find_if(rows, [&](const auto& r) { return r.name == row; });
    if (!found->takes(p, cases.twins().device)) continue;
    std::memcpy(begin, before.data(), before.size());
    expect_within(cases, p, o, row);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

/// Each spec is an operand twice, beside the one before it and the one after it.
TEST(TensorProducts, OfEverySpecAreWithinTheirBound) {
  ProductCases cases(21);
  std::string other = "mxfp8";
  size_t turn = 0;
  for (const std::string& spec : whole_grammar()) {
    cases.clear();
    const Direction d = ++turn % 2 ? kRows : kColumns;
    const int64_t outer = 9, length = 35 + static_cast<int64_t>(turn % 3) * 13;
    const auto operand = [&](const std::string& s, Direction to) {
      return to == kRows ? cases.operand(s, to, outer, length) : cases.operand(s, to, length, outer);
    };
    Operand a = operand(other, d), b = operand(spec, d);
    if (transformed(a) != transformed(b)) a = operand(other, kRows), b = operand(spec, kRows);
    other = spec;
    const Output o = cases.output(kDTypes[turn % 3], outer, outer);
    expect_within(cases, {.a = a, .b = b, .out = o.out}, o);
    if (HasFatalFailure()) return;
  }
  std::cout << cases.compared << " outputs compared, off by at most " << worst << " roundings\n";
}

TEST(TensorProducts, OfEveryRecipeInEveryDirectionAreWithinTheirBound) {
  ProductCases cases(22);
  each_product(cases, 3, [&](const GemmProblem& p, const Output& o) { expect_within(cases, p, o); });
  std::cout << cases.compared << " outputs compared, off by at most " << worst << " roundings\n";
}

TEST(TensorProducts, OfGroupsWhoseEndsAreOnTheDeviceAreWithinTheirBound) {
  ProductCases cases(23);
  for (size_t i = 0; i < kRecipes.size(); i += 2)
    each_grouped_product(cases, kRecipes[i],
                         [&](const GemmProblem& p, const Output& o) { expect_within(cases, p, o); });
  std::cout << cases.compared << " outputs compared, off by at most " << worst << " roundings\n";
}

/// Every byte is some code, also those that no quantizer writes: infinite ones and NaN.
TEST(TensorProducts, DecodeEveryCode) {
  ProductCases cases(24);
  cases.numbers = 3;
  for (const char* spec : {"fp8_tensor", "fp8_tensor:e5m2", "fp8_block", "mxfp8", "mxfp8:e5m2", "mxfp4", "nvfp4"}) {
    cases.clear();
    const Operand a = cases.operand(spec, kRows, 70, 8), b = cases.operand(spec, kRows, 3, 8);
    auto* const codes = static_cast<uint8_t*>(const_cast<void*>(a.data));
    for (int64_t i = 0; i < a.room[0]; ++i) codes[i] = static_cast<uint8_t>(i);
    const Output o = cases.output(DType::f32, 70, 3);
    expect_within(cases, {.a = a, .b = b, .out = o.out}, o);
  }
}

/// Every byte of a scale, also the smallest, the largest and NaN.
TEST(TensorProducts, ScaleByEveryByteOfAScale) {
  ProductCases cases(25);
  cases.numbers = 3;
  for (const char* spec : {"mxfp8", "mxfp4", "nvfp4", "mxfp8:e5m2:swizzled"}) {
    cases.clear();
    const Operand a = cases.operand(spec, kRows, 256, 16), b = cases.operand("fp8_tensor:given", kRows, 3, 16);
    auto* const scales = static_cast<uint8_t*>(const_cast<void*>(a.scale));
    for (int64_t i = 0; i < a.room[1]; ++i) scales[i] = static_cast<uint8_t>(i);
    const Output o = cases.output(DType::f32, 256, 3);
    expect_within(cases, {.a = a, .b = b, .out = o.out}, o);
  }
}

using Pairs = std::vector<std::pair<const char*, const char*>>;

/// Some steps of a contraction and a part of one, and a part alone.
constexpr int64_t kSteps = 166, kPart = 25;

/// Operands of a whole tile.
template <class Each>
void each_pair(const Pairs& specs, Direction d, int64_t length, const Each& each) {
  ProductCases cases(27);
  constexpr int64_t rows = 64, cols = 64;
  for (const auto& [x, w] : specs) {
    cases.clear();
    const auto operand = [&](const char* spec, int64_t outer) {
      return d == kRows ? cases.operand(spec, d, outer, length) : cases.operand(spec, d, length, outer);
    };
    const Output o = cases.output(DType::f32, rows, cols);
    const Vector bias = cases.vector(DType::f32, cols);
    each(cases, GemmProblem{.a = operand(x, rows), .b = operand(w, cols), .out = o.out, .bias = bias.data}, o);
  }
}

TEST(TensorProducts, OfEachKindOfOperandAreWithinTheirBound) {
  const auto within = [](ProductCases& cases, const GemmProblem& p, const Output& o) { expect_within(cases, p, o); };
  each_pair({{"fp8_block:e5m2", "nvfp4:row_scaled"},
             {"fp8_row", "fp8_block:128x128"},
             {"mxfp8:interleaved", "fp8_row:e5m2"},
             {"nvfp4:swizzled", "mxfp4"}},
            kRows, kSteps, within);
  each_pair({{"mxfp8", "mxfp8:e5m2:swizzled"}, {"nvfp4:rht", "nvfp4:rht"}}, kColumns, kSteps, within);
  each_pair({{"fp8_block", "fp8_row"}}, kRows, kPart, within);
}

/// More tiles than blocks, of outputs and of what is decoded.
TEST(TensorProducts, OfMoreTilesThanBlocksAreWithinTheirBound) {
  ProductCases cases(28);
  constexpr int64_t few = 72, outer = 640, length = 520;
  for (const Direction d : {kRows, kColumns}) {
    cases.clear();
    const auto operand = [&](const char* spec, int64_t lines) {
      return d == kRows ? cases.operand(spec, d, lines, length) : cases.operand(spec, d, length, lines);
    };
    const Output o = cases.output(DType::bf16, few, outer);
    const Operand a = operand(d == kRows ? "nvfp4" : "mxfp8:e5m2", few), b = operand("mxfp8", outer);
    expect_within(cases, {.a = a, .b = b, .out = o.out}, o, "pipelined_bf16");
    if (HasFatalFailure()) return;
  }
}

/// The first rows of a batch alone give the bits that they have in it, in wide tiles and in others.
TEST(TensorProducts, OfDecodedRowsDoNotDependOnTheirBatch) {
  ProductCases cases(30);
  constexpr int64_t rows = 136, cols = 1032, length = 264;
  const Operand a = cases.operand("fp8_row", kRows, rows, length), b = cases.operand("mxfp8", kRows, cols, length);
  const auto run = [&](int64_t some) {
    GemmProblem p{.a = a, .b = b, .out = cases.output(DType::f32, some, cols).out};
    p.a.outer = some;
    cases.run(p, "pipelined_bf16");
    return p.out;
  };
  const MutableMatrix whole = run(rows);
  for (const int64_t few : {17, 65}) {
    SCOPED_TRACE(text(few, " rows"));
    expect_first_rows(run(few), whole);
    if (HasFatalFailure()) return;
  }
}

/// By which products of a few columns are bound: an operand is decoded once, by so many instructions of PTX a code.
TEST(TensorProducts, OfDecodedOperandsTakeFewInstructionsForACode) {
  if (on_gpu()) GTEST_SKIP() << "a GPU counts none";
  struct Counted {
    const char* spec;
    Direction direction;
    double most;
  };
  constexpr int64_t lines = 640, few = 8;
  // Of a tile of the pipeline, for the codes of its lines.
  constexpr double of_products = 2.4 * 32 * (128.0 * 128 * 16 / (16 * 8 * 16)) / (128 * 16);
  for (const Counted& c : {Counted{"fp8_row", kRows, 20}, Counted{"mxfp8", kRows, 24}, Counted{"mxfp8", kColumns, 28},
                           Counted{"nvfp4", kRows, 24}, Counted{"nvfp4", kColumns, 24}}) {
    const auto steps_of = [&](int64_t length) {
      ProductCases cases(29);
      const auto operand = [&](int64_t outer) {
        return c.direction == kRows ? cases.operand(c.spec, kRows, outer, length)
                                    : cases.operand(c.spec, kColumns, length, outer);
      };
      const Output o = cases.output(DType::f32, lines, few);
      cases.run(GemmProblem{.a = operand(lines), .b = operand(few), .out = o.out}, "pipelined_bf16");
      return static_cast<double>(cases.twins().device.steps());
    };
    const double of_a_code = (steps_of(1024) - steps_of(512)) / (lines * 512) - of_products;
    std::cout << c.spec << (c.direction == kRows ? "" : " across") << ": " << of_a_code << " instructions a code\n";
    EXPECT_LT(of_a_code, c.most) << c.spec;
  }
}

TEST(TensorProducts, OfFourBitCodesHaveTheBitsOfTheContractAndOfTheCpu) {
  each_pair({{"nvfp4", "nvfp4:4over6=mae:swizzled"}, {"mxfp4", "mxfp4:interleaved"}, {"nvfp4:row_scaled", "mxfp4"}},
            kRows, kSteps, [](ProductCases& cases, const GemmProblem& p, const Output& o) {
              cases.expect_bits(p, o, "exact", [&] { contract(p); });
              GemmProblem few = p;  // of fewer rows than those from which AMX has other bits (numerics.md 7.4)
              few.a.outer = few.out.rows = 31;
              cases.expect_bits(few, o, "exact", [&] { dispatch(few, host()); });
            });
}

TEST(TensorProducts, OfLargeTilesAreWithinTheirBoundAndTakeFewInstructions) {
  struct Counted {
    const char *a, *b;
    Direction direction;
    double most;  ///< instructions of PTX that a thread runs for each 16 x 8 x 16 that its warp multiplies
  };
  for (const Counted& c :
       {Counted{"fp8_tensor", "fp8_tensor", kRows, 17}, Counted{"fp8_block", "fp8_block:128x128", kRows, 22},
        Counted{"mxfp8", "mxfp8", kRows, 21}, Counted{"mxfp8", "mxfp8", kColumns, 25},
        Counted{"nvfp4", "nvfp4:16x16", kRows, 21}, Counted{"mxfp4:swizzled", "mxfp4:swizzled", kRows, 21}}) {
    constexpr int64_t rows = 256, cols = 128;
    const auto steps_of = [&](int64_t length) {
      ProductCases cases(26);
      const auto operand = [&](const char* spec, int64_t outer) {
        return c.direction == kRows ? cases.operand(spec, kRows, outer, length)
                                    : cases.operand(spec, kColumns, length, outer);
      };
      const Output o = cases.output(DType::f32, rows, cols);
      const GemmProblem p{.a = operand(c.a, rows), .b = operand(c.b, cols), .out = o.out};
      if (length == 128)
        expect_within(cases, p, o, "decode");
      else
        cases.run(p, "decode");
      return static_cast<double>(cases.twins().device.steps());
    };
    const double few = (steps_of(256) - steps_of(128)) / (rows * cols * 128 / (16 * 8 * 16)) / 32;
    std::cout << c.a << " x " << c.b << ": " << few << " instructions a multiplication\n";
    if (on_gpu()) continue;
    EXPECT_LT(few, c.most) << c.a;
  }
}

}  // namespace
}  // namespace quire::testing
