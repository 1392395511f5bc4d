// Products by cuBLASLt: whether it is told the right thing, by a stand-in that computes what it is told. On a GPU the
// library itself computes.
#include <iostream>

#include "cuda/cublaslt_problems.h"

namespace quire::testing {
namespace {

struct Recipe {
  const char *x, *w, *dy;
  int chip;
  Shape3 shape;               ///< tokens, outputs, inputs
  const char* taken = "fdw";  ///< of the products of a Linear
};
constexpr std::array kRecipes{
    Recipe{"fp8_tensor", "fp8_tensor", "fp8_tensor:e5m2", 89, {32, 48, 64}},
    Recipe{"fp8_tensor:nan", "fp8_tensor:pow2", "fp8_tensor:e5m2:nan", 90, {16, 32, 48}},
    Recipe{"fp8_tensor", "fp8_tensor", "fp8_tensor", 100, {21, 32, 48}, "fd"},
    Recipe{"fp8_row", "fp8_row:pow2", "fp8_row:e5m2", 90, {48, 32, 64}},
    Recipe{"fp8_row", "fp8_row", "fp8_row", 90, {19, 32, 48}, "fd"},
    Recipe{"fp8_block", "fp8_block:128x128", "fp8_block", 90, {128, 128, 256}},
    Recipe{"fp8_block:pow2:128x128", "fp8_block:pow2", "fp8_block:e5m2", 90, {128, 128, 128}},
    Recipe{"fp8_block", "fp8_block:128x128", "fp8_block", 90, {20, 48, 640}, "f"},
    Recipe{"fp8_block", "fp8_block", "fp8_block", 90, {20, 16, 128}, "f"},
    Recipe{"mxfp8", "mxfp8", "mxfp8:e5m2", 100, {64, 48, 96}, "f w"},
    Recipe{"mxfp8", "mxfp8:32x32", "mxfp8", 100, {64, 32, 160}},
    Recipe{"mxfp8:swizzled", "mxfp8:swizzled", "mxfp8:swizzled", 103, {160, 64, 32}},
    Recipe{"mxfp8", "mxfp8", "mxfp8", 120, {37, 32, 64}, "f"},
    Recipe{"nvfp4", "nvfp4:16x16", "nvfp4:sr", 100, {64, 32, 96}},
    Recipe{"nvfp4:rht", "nvfp4:16x16", "nvfp4:rht:sr", 120, {50, 32, 64}},
    Recipe{"nvfp4:4over6=mae:256", "nvfp4:global=div", "nvfp4:global=mul", 103, {33, 32, 64}, "fd"},
    Recipe{"nvfp4:swizzled", "nvfp4:swizzled", "nvfp4:swizzled", 120, {160, 160, 32}},
};

/// Operands of the three products of a Linear: f, d and w.
std::array<std::array<Operand, 2>, 3> operands_of(LtCases& cases, const Recipe& r) {
  const auto& [m, n, k] = r.shape;
  return {{{cases.operand(r.x, kRows, m, k), cases.operand(r.w, kRows, n, k)},
           {cases.operand(r.dy, kRows, m, n), cases.operand(r.w, kColumns, n, k)},
           {cases.operand(r.dy, kColumns, m, n), cases.operand(r.x, kColumns, m, k)}}};
}

TEST(CublasLt, ComputesTheProductsOfEveryRecipeThatItTakes) {
  LtCases cases(1);
  size_t turn = 0;
  for (const Recipe& r : kRecipes) {
    cases.clear();
    cases.pretend(chip(r.chip));
    const auto operands = operands_of(cases, r);
    for (size_t product = 0; product < 3; ++product) {
      const std::string_view taken(r.taken);
      SCOPED_TRACE(text(r.x, ", ", r.w, ", ", r.dy, ": ", "fdw"[product]));
      const GemmProblem plain = problem_of(cases, operands[product], kVariants[0]);
      const std::string why = cases.refusal(plain);
      if (on_gpu() && !why.empty()) continue;
      EXPECT_EQ(why.empty(), taken.find("fdw"[product]) != std::string_view::npos) << why;
      if (!why.empty()) continue;
      const bool small = plain.out.rows * plain.out.cols * plain.a.contraction < 200000;
      for (size_t v = small ? 0 : turn++ % kVariants.size(); v < kVariants.size(); v += small ? 1 : kVariants.size()) {
        expect_bound(cases, problem_of(cases, operands[product], kVariants[v]));
        if (HasFatalFailure()) return;
      }
    }
  }
  std::cout << cases.compared << " outputs compared\n";
}

/// Numbers of many magnitudes and zeros, in operands with global scales.
TEST(CublasLt, MultipliesByGlobalScalesOfTheDevice) {
  LtCases cases(2);
  for (const uint64_t kind : {1, 4}) {
    cases.numbers = kind;
    for (const char* spec : {"nvfp4", "nvfp4:global=mul", "nvfp4:256:4over6=mse"}) {
      cases.clear();
      cases.pretend(chip(100));
      const std::array operands{cases.operand(spec, kRows, 20, 64), cases.operand("nvfp4:global=div", kRows, 32, 64)};
      for (const Variant& v : kVariants) {
        const GemmProblem p = problem_of(cases, operands, v);
        if (v.dtype != DType::f32 || (on_gpu() && !cases.refusal(p).empty())) continue;
        expect_bound(cases, p);
      }
    }
  }
}

/// The scale of a tensor that is one of many in memory, as of a sample of a batch.
TEST(CublasLt, TakesAScaleWhereverItLies) {
  LtCases cases(12);
  std::array operands{cases.operand("fp8_tensor", kRows, 20, 64), cases.operand("fp8_tensor", kRows, 32, 64)};
  for (Operand& o : operands) {
    auto* const scales = static_cast<float*>(cases.output(DType::f32, 1, 8).out.data);
    scales[1] = *static_cast<const float*>(o.scale);
    o.scale = scales + 1;
  }
  const GemmProblem p = problem_of(cases, operands, kVariants[0]);
  EXPECT_EQ(cases.refusal(p), "");
  expect_bound(cases, p);
}

TEST(CublasLt, IsAskedOnceForEachShapeAndSplitsNoContraction) {
  if (on_gpu()) GTEST_SKIP() << "a GPU has no stand-in";
  LtCases cases(3);
  const std::array operands{cases.operand("fp8_tensor", kRows, 20, 64), cases.operand("fp8_tensor", kRows, 32, 64)};
  const GemmProblem p{.a = operands[0], .b = operands[1], .out = cases.output(DType::f32, 20, 32 + 8).out};
  GemmProblem one = p;
  one.out.cols = 32, one.out.row_stride = 32;
  for (int i = 0; i < 3; ++i) cases.run(one, "cublaslt");
  EXPECT_EQ(cases.state.asked, 1);
  EXPECT_EQ(cases.state.handles, 1);
  GemmProblem fewer = one;
  fewer.a.outer = fewer.out.rows = 19;
  cases.run(fewer, "cublaslt");
  cases.run(one, "cublaslt");
  EXPECT_EQ(cases.state.asked, 2);
  const auto wish = [&](int which) {
    uint32_t value = 77;
    std::memcpy(&value, cases.state.last.wishes.at(which).data(), sizeof value);
    return value;
  };
  EXPECT_EQ(wish(cuda::lt::kReductions), cuda::lt::kNoReduction);
  for (const int which : {cuda::lt::kAlignOfA, cuda::lt::kAlignOfB, cuda::lt::kAlignOfC, cuda::lt::kAlignOfD})
    EXPECT_EQ(wish(which), 16u);
  EXPECT_EQ(cases.state.last.product.at(cuda::lt::kFastAccumulation), std::string(1, '\0'));
}

TEST(CublasLt, KeepsAtMostSoManyAlgorithms) {
  if (on_gpu()) GTEST_SKIP() << "a GPU has no stand-in";
  LtCases cases(4);
  const Operand w = cases.operand("fp8_tensor", kRows, 16, 16);
  GemmProblem p{.a = w, .b = w, .out = {nullptr, DType::f32, 0, 16, 16}};
  constexpr int kept = 1024;
  const auto ask = [&](int rows) {
    p.a.outer = p.out.rows = rows;
    EXPECT_EQ(cases.refusal(p), "");
  };
  for (int rows = 1; rows <= kept; ++rows) ask(rows);
  ask(1), ask(kept);
  EXPECT_EQ(cases.state.asked, kept);
  ask(kept + 1), ask(1);
  EXPECT_EQ(cases.state.asked, kept + 2);
  // What it cannot do is kept too; what failed for a while is not.
  p.a.outer = p.out.rows = kept + 2;
  cases.state.answer = 3;
  EXPECT_NE(cases.refusal(p), "");
  cases.state.answer = 15;
  for (int i = 0; i < 2; ++i) EXPECT_NE(cases.refusal(p), "");
  EXPECT_EQ(cases.state.asked, kept + 4);
}

/// A library that fails while it computes, after it was asked.
TEST(CublasLt, RaisesWhatTheLibraryFailsWith) {
  if (on_gpu()) GTEST_SKIP() << "a GPU has no stand-in";
  LtCases cases(7);
  const std::array operands{cases.operand("fp8_tensor", kRows, 20, 64), cases.operand("fp8_tensor", kRows, 32, 64)};
  const GemmProblem p = problem_of(cases, operands, kVariants[0]);
  EXPECT_EQ(cases.refusal(p), "");
  cases.state.result = 13;
  try {
    cases.run(p, "cublaslt");
    ADD_FAILURE() << "no error";
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(),
                 "gemm: cuBLASLt failed with status 13; set QUIRE_KERNEL=gemm:decode32 to multiply without it");
  }
}

TEST(CublasLt, SaysWhichMachinesAndSpecsItDoesNotTake) {
  if (on_gpu()) GTEST_SKIP() << "other machines are described on the emulator";
  LtRefusals cases(5);
  const GemmProblem tensor = cases.problem("fp8_tensor", "fp8_tensor");
  cases.expect(chip(90), tensor, "");
  cases.expect(chip(90, 0), tensor, "cuBLASLt (libcublasLt.so.13 or .12) is not on this machine");
  cases.expect(chip(80), tensor, "multiplies fp8_tensor on compute capability 8.9 and newer, but the device has 8.0");
  cases.expect(chip(90), cases.problem("mxfp8", "mxfp8"),
               "multiplies mxfp8 on compute capability 10.x and 12.x, but the device has 9.0");
  cases.expect(chip(100), cases.problem("fp8_row", "fp8_row"),
               "multiplies fp8_row on compute capability 9.0, but the device has 10.0");
  cases.expect(chip(90, 120803), cases.problem("fp8_block", "fp8_block"),
               "needs cuBLASLt 12.9.0, but 12.8.3 is loaded");
  cases.expect(chip(90), cases.problem("mxfp4", "mxfp4"), "takes no mxfp4");
  cases.expect(chip(90), cases.problem("fp8_tensor", "fp8_row"),
               "takes operands of one family, but they are fp8_tensor and fp8_row");
  cases.expect(chip(90), cases.problem("fp8_tensor", "fp8_tensor:interleaved"), "takes no interleaved codes");
  cases.expect(chip(100), cases.problem("nvfp4:row_scaled", "nvfp4"),
               "takes NVFP4 with one global scale, but a row has its own");
  cases.expect(chip(90), cases.problem("fp8_row:e5m2", "fp8_row:e5m2"), "does not multiply E5M2 by E5M2");
  cases.expect(chip(90), cases.problem("fp8_block:128x128", "fp8_block:128x128"),
               "takes scales of 128 x 128 in one operand, but both have them");
}

TEST(CublasLt, SaysWhichSizesAndMemoryItDoesNotTake) {
  if (on_gpu()) GTEST_SKIP() << "other machines are described on the emulator";
  LtRefusals cases(8);
  const GemmProblem tensor = cases.problem("fp8_tensor", "fp8_tensor");
  cases.expect(chip(90), cases.problem(cases.operand("fp8_tensor", 0), cases.operand("fp8_tensor")),
               "takes no empty product");
  cases.expect(chip(90), cases.problem(cases.operand("fp8_tensor", 32, 40), cases.operand("fp8_tensor", 32, 40)),
               "contracts multiples of 16 elements, but there are 40");
  cases.expect(chip(90), cases.problem(cases.operand("fp8_block", 32, 192), cases.operand("fp8_block", 32, 192)),
               "contracts multiples of 128 elements, but there are 192");
  cases.expect(chip(90), cases.problem(cases.operand("fp8_tensor"), cases.operand("fp8_tensor", 24)),
               "takes multiples of 16 lines of gemm: an operand, which has 24");
  cases.expect(chip(90), cases.problem(cases.operand("fp8_block", 30), cases.operand("fp8_block")),
               "takes multiples of 4 lines of gemm: an operand, which has 30");
  cases.expect(chip(100),
               cases.problem(cases.operand("mxfp8", 24, 128, kColumns), cases.operand("mxfp8", 32, 128, kColumns)),
               "takes multiples of 16 lines of gemm: an operand, which has 24");
  cases.expect(chip(120), cases.problem(cases.operand("mxfp8"), cases.operand("mxfp8", 32, 128, kColumns)),
               "reads columnwise mxfp8 on compute capability 12.x from cuBLASLt 13.6.0 on, but 13.1.0 is loaded");
  cases.expect(chip(120, 130600), cases.problem(cases.operand("mxfp8"), cases.operand("mxfp8", 32, 128, kColumns)), "");

  GemmProblem p = tensor;
  p.b.data = static_cast<const char*>(p.b.data) + 1;
  cases.expect(chip(90), p, "takes memory that begins at multiples of 16 bytes, but that of gemm: an operand does not");
  p = tensor, p.out.row_stride = 33;
  cases.expect(chip(90), p, "writes rows that begin at multiples of 16 bytes, but those of out do not");
  p = tensor, p.bias = p.b.data, p.bias_dtype = DType::f32;
  cases.expect(chip(90), p, "adds an aligned bias in bfloat16 to float32, but it is in float32");
  p = cases.problem(cases.operand("fp8_tensor"), cases.operand("fp8_tensor"), DType::bf16), p.addend = p.out.data;
  cases.expect(chip(90), p,
               "adds to out before it rounds, which is the contract's order in float32 only, but out is bfloat16");
  p = tensor, p.addend = static_cast<const char*>(p.out.data) + 4;
  cases.expect(chip(90), p, "adds memory that begins at multiples of 16 bytes, but that of the addend does not");
  p = tensor, p.a.groups = RowGroups::equal(2, 16);
  cases.expect(chip(90), p, "takes one product, but the problem has groups");
  cases.state.answer = 15;
  cases.expect(chip(90), tensor, "cuBLASLt 13.1.0 offers no algorithm for this product (status 15)");
  cases.state.creation = 3;
  cases.expect(chip(90), tensor, "cuBLASLt 13.1.0 offers no algorithm for this product (status 3)");
}

TEST(CublasLt, OneHandleIsMadeForAllQuestionsThatFail) {
  if (on_gpu()) GTEST_SKIP() << "a GPU has no stand-in";
  LtRefusals cases(9);
  cases.pretend(chip(90));
  cases.state.answer = 3;  // memory is short, which is not kept: the next call asks again
  const GemmProblem p = cases.problem("fp8_tensor", "fp8_tensor");
  for (int i = 0; i < 3; ++i)
    EXPECT_EQ(cases.refusal(p), "cuBLASLt 13.1.0 offers no algorithm for this product (status 3)");
  EXPECT_GE(cases.state.asked, 3);
  EXPECT_EQ(cases.state.handles, 1);
}

}  // namespace
}  // namespace quire::testing
