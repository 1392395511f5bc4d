// Products by cuBLASLt of what codes are in bfloat16, by a stand-in that computes what it is told. On a GPU the library
// itself computes.
#include <iostream>

#include "cuda/cublaslt_problems.h"

namespace quire::testing {
namespace {

/// Lines of which the row takes products, and some more.
constexpr int64_t kMany = 144;

struct Bf16Recipe {
  const char *a, *b;
  Direction of_a = kRows, of_b = kRows;
  int64_t contraction = 64;
};
constexpr std::array kBf16Recipes{
    Bf16Recipe{"mxfp8", "mxfp8"},
    Bf16Recipe{"mxfp8:e5m2", "mxfp8:32x32", kRows, kColumns},
    Bf16Recipe{"mxfp8:e5m2", "mxfp8", kColumns, kColumns, 32},
    Bf16Recipe{"mxfp8:swizzled", "mxfp8:swizzled", kColumns, kRows, 160},
    Bf16Recipe{"mxfp4", "mxfp4", kRows, kColumns},
    Bf16Recipe{"mxfp4:swizzled", "mxfp8", kColumns, kColumns, 48},
    Bf16Recipe{"nvfp4", "nvfp4:16x16"},
    Bf16Recipe{"nvfp4:sr", "nvfp4:16x16", kRows, kColumns, 16},
    Bf16Recipe{"nvfp4:rht:swizzled", "nvfp4:rht", kColumns, kColumns, 80},
    Bf16Recipe{"nvfp4:4over6=mae:256", "nvfp4:global=div"},
    Bf16Recipe{"nvfp4:global=mul", "mxfp8"},
    Bf16Recipe{"fp8_tensor", "mxfp4"},
    Bf16Recipe{"fp8_tensor:e5m2:nan", "fp8_tensor:given", kColumns, kRows},
};

Operand operand_of(LtCases& cases, const char* spec, Direction d, int64_t outer, int64_t length) {
  return d == kRows ? cases.operand(spec, d, outer, length) : cases.operand(spec, d, length, outer);
}

TEST(CublasLt, ComputesWithWhatCodesAreInBfloat16) {
  LtCases cases(10);
  size_t turn = 0;
  for (const Bf16Recipe& r : kBf16Recipes) {
    cases.clear();
    cases.pretend(chip(turn % 2 ? 80 : 90));
    const std::array operands{operand_of(cases, r.a, r.of_a, kMany, r.contraction),
                              operand_of(cases, r.b, r.of_b, kMany + 16, r.contraction)};
    for (const Variant& v : kVariants) {
      if (v.dtype == DType::f16 || ++turn % 2) continue;
      const GemmProblem p = problem_of(cases, operands, v, true);
      EXPECT_EQ(cases.refusal(p, "cublaslt_bf16"), "") << r.a << ", " << r.b;
      expect_bound(cases, p, "cublaslt_bf16");
      if (HasFatalFailure()) return;
    }
  }
  std::cout << cases.compared << " outputs compared\n";
}

/// Codes of a spec, of which every byte is one, also those that no quantizer writes: infinite ones and NaN, in every
/// fourth line. The same of scales.
Operand every_code(LtCases& cases, const char* spec, Direction d, int64_t outer, int64_t length) {
  const Operand o = operand_of(cases, spec, d, outer, length);
  auto* const codes = static_cast<uint8_t*>(const_cast<void*>(o.data));
  for (int64_t i = 0; i < o.room[0]; ++i) codes[i] = static_cast<uint8_t>(i + i / 256);
  for (int64_t i = 0; !o.spec.packed() && i < outer; ++i)
    for (int64_t l = 0; l < length; ++l)
      if (uint8_t& code = codes[data_index({o.spec, d, outer, length}, i, l)];
          i % 4 != 0 && !std::isfinite(decode(o.spec.element, code)))
        code = 0x11;
  auto* const scales = static_cast<uint8_t*>(const_cast<void*>(o.scale));
  for (int64_t i = 0; has_byte_scales(o.spec) && i < o.room[1]; ++i) scales[i] = static_cast<uint8_t>(i);
  return o;
}

/// The other operand has a single 1 in each line, so that an output is one number; beside NaN all of a row is NaN.
TEST(CublasLt, DecodesEveryCodeAndScaleToBfloat16) {
  constexpr int64_t outer = 256, length = 128;
  for (const char* spec : {"fp8_tensor", "fp8_tensor:e5m2", "mxfp8", "mxfp8:e5m2", "mxfp4", "nvfp4"})
    for (const Direction d : {kRows, kColumns}) {
      LtCases cases(11);
      const Operand a = every_code(cases, spec, d, outer, length), one = cases.operand("mxfp8", kRows, length, length);
      auto* const ones = static_cast<uint8_t*>(const_cast<void*>(one.data));
      for (int64_t i = 0; i < length * length; ++i) ones[i] = i % (length + 1) == 0 ? 0x38 : 0;
      std::memset(const_cast<void*>(one.scale), 127, static_cast<size_t>(one.room[1]));
      const Output o = aligned_output(cases, DType::f32, outer, length);
      cases.run(GemmProblem{.a = a, .b = one, .out = o.out}, "cublaslt_bf16");
      int64_t finite_lines = 0;
      for (int64_t i = 0; i < outer; ++i) {
        std::vector<double> wanted;
        for (int64_t l = 0; l < length; ++l) wanted.push_back(OperandReader{a}.value(i, l));
        const bool finite = std::ranges::all_of(wanted, [](double x) { return std::fabs(x) < 0x1p128; });
        finite_lines += finite;
        for (int64_t l = 0; l < length; ++l) {
          const auto y = static_cast<double>(load_element(o.out.data, DType::f32, i * o.out.row_stride + l));
          const double limit = std::fabs(wanted[static_cast<size_t>(l)]) * 0x1p-22 + 0x1p-133;
          ASSERT_TRUE(finite ? std::fabs(y - wanted[static_cast<size_t>(l)]) <= limit : !std::isfinite(y))
              << spec << " at " << i << ", " << l << ": " << y << " instead of " << wanted[static_cast<size_t>(l)];
        }
      }
      EXPECT_GE(finite_lines, outer / 2) << spec;
    }
}

TEST(CublasLt, SaysWhichProductsItDoesNotTakeInBfloat16) {
  if (on_gpu()) GTEST_SKIP() << "other machines are described on the emulator";
  LtRefusals cases(13);
  const auto expect = [&](const GemmProblem& p, std::string_view why) {
    cases.pretend(chip(90));
    EXPECT_EQ(cases.refusal(p, "cublaslt_bf16"), why);
  };
  const auto many = [&](const char* spec, int64_t length = 128) { return cases.operand(spec, kMany, length); };
  const GemmProblem taken = cases.problem(many("mxfp8"), many("nvfp4"));
  expect(taken, "");
  expect(cases.problem(cases.operand("mxfp8", 127), many("mxfp8")),
         "takes at least 128 rows and columns, but there are 127 and 144; to decode an operand takes longer than it "
         "saves below");
  expect(cases.problem(many("mxfp8"), many("fp8_block")),
         "takes codes whose product with their scale is exact in bfloat16, but gemm: an operand is fp8_block");
  expect(cases.problem(many("nvfp4:row_scaled"), many("nvfp4")),
         "takes one factor for all sums, but lines of nvfp4:row_scaled have their own");
  expect(cases.problem(many("fp8_row"), many("nvfp4")),
         "takes one factor for all sums, but lines of fp8_row have their own");
  expect(cases.problem(many("mxfp8", 40), many("mxfp8", 40)),
         "takes rows of a multiple of 16 codes, but those of gemm: an operand have 40");
  expect(cases.problem(many("mxfp8:interleaved"), many("mxfp8")), "takes no interleaved codes");
  expect(cases.problem(many("mxfp8"), many("mxfp8"), DType::f16),
         "cuBLASLt 13.1.0 offers no algorithm for this product (status 15)");
  GemmProblem p = taken;
  p.a.data = static_cast<const char*>(p.a.data) + 8;
  expect(p, "takes memory that begins at multiples of 16 bytes, but that of gemm: an operand does not");
  p = taken, p.a.groups = RowGroups::equal(2, kMany / 2);
  expect(p, "takes one product, but the problem has groups");
  cases.pretend(chip(90, 0));
  EXPECT_EQ(cases.refusal(taken, "cublaslt_bf16"), "cuBLASLt (libcublasLt.so.13 or .12) is not on this machine");
}

}  // namespace
}  // namespace quire::testing
