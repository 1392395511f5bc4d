// Products on the CUDA device: the reference's bits are those of the CPU's reference, in double; the other rows give
// the bits of numerics.md 7.4 in float32.
#include <iostream>

#include "cuda/product_recipes.h"

namespace quire::testing {
namespace {

TEST(Products, OfTheReferenceHaveTheBitsOfTheCpusForEverySpecOfARecipe) {
  ProductCases cases(1);
  each_product(cases, 2, [&](const GemmProblem& p, const Output& o) {
    cases.expect_bits(p, o, "reference", [&] { reference::gemm(p); });
  });
  std::cout << cases.compared << " outputs compared\n";
}

/// The rows that sum as 7.4 orders it, which take `p`.
std::vector<std::string_view> quick_rows(ProductCases& cases, const GemmProblem& p) {
  std::vector<std::string_view> found;
  for (const KernelRow<GemmProblem>& row : kernels<GemmProblem>(cases.twins().device))
    if (row.name != "reference" && row.name != "pipelined_bf16" && row.name != "decode" && row.name != "skinny" &&
        !row.name.starts_with("cublaslt") && row.takes(p, cases.twins().device))
      found.push_back(row.name);
  return found;
}

void expect_contract(ProductCases& cases, const GemmProblem& p, const Output& o) {
  for (const std::string_view row : quick_rows(cases, p))
    cases.expect_bits(p, o, row, [&] { each_group_by(p, contract); });
}

TEST(Products, OfQuickRowsHaveTheBitsOfTheContractInFloat32ForEverySpecOfARecipe) {
  ProductCases cases(11);
  each_product(cases, 3, [&](const GemmProblem& p, const Output& o) { expect_contract(cases, p, o); });
  std::cout << cases.compared << " outputs compared\n";
}

/// Every byte is some code, also those that no quantizer writes: infinite ones and NaN.
TEST(Products, OfQuickRowsDecodeEveryCode) {
  ProductCases cases(12);
  cases.numbers = 3;
  for (const char* spec : {"fp8_tensor", "fp8_tensor:e5m2", "mxfp8:e5m2", "mxfp4", "nvfp4"})
    for (const int64_t m : {16, 300}) {
      cases.clear();
      const Operand a = cases.operand(spec, kRows, m, 2), b = cases.operand(spec, kRows, 3, 2);
      auto* const codes = static_cast<uint8_t*>(const_cast<void*>(a.data));
      for (int64_t i = 0; i < a.room[0]; ++i) codes[i] = static_cast<uint8_t>(i);
      const Output o = cases.output(DType::f32, m, 3);
      expect_contract(cases, {.a = a, .b = b, .out = o.out}, o);
    }
}

TEST(Products, OfQuickRowsAreWithinTheBoundOfTheContract) {
  ProductCases cases(13);
  for (const Recipe& r : kRecipes)
    for (const Shape3& s : {Shape3{18, 12, 260}}) {
      cases.clear();
      for (const auto& [a, b] : products(cases, r, s, 1)) {
        if (transformed(a) != transformed(b)) continue;
        const Output o = cases.output(DType::f32, a.outer, b.outer);
        const GemmProblem p{.a = a, .b = b, .out = o.out};
        for (const std::string_view row : quick_rows(cases, p)) {
          cases.run(p, row);
          for (int64_t i = 0; i < a.outer; ++i)
            for (int64_t j = 0; j < b.outer; ++j) {
              double sum = 0, magnitude = 0;
              for (int64_t l = 0; l < a.contraction; ++l) {
                const double product = OperandReader{a}.value(i, l) * OperandReader{b}.value(j, l);
                sum += product, magnitude += std::fabs(product);
              }
              const double bound = static_cast<double>(a.contraction + 6) * 0x1p-24 * magnitude;
              const auto y = static_cast<double>(load_element(o.out.data, DType::f32, i * o.out.row_stride + j));
              ASSERT_LE(std::fabs(y - sum), bound) << row << " of " << to_string(p) << " at " << i << ", " << j;
            }
        }
      }
    }
}

/// The first rows of a batch alone give the bits that they have in it, by each row of the table that takes both. (Of
/// NVIDIA's library nothing is promised: numerics.md 7.6. test_skinny.cpp has its own test.)
TEST(Products, OfARowDoNotDependOnItsBatch) {
  ProductCases cases(14);
  constexpr int64_t rows = 66, cols = 130, length = 144;
  for (const char* spec : {"fp8_row", "mxfp8", "nvfp4:row_scaled", "mxfp4:swizzled"}) {
    cases.clear();
    const Operand a = cases.operand(spec, kRows, rows, length), b = cases.operand(spec, kRows, cols, length);
    const auto product_of = [&](int64_t some, std::string_view row) {
      Operand part = a;
      part.outer = some;
      const Output o = cases.output(DType::f32, some, cols);
      cases.run(GemmProblem{.a = part, .b = b, .out = o.out}, row);
      return o.out;
    };
    for (const KernelRow<GemmProblem>& row : kernels<GemmProblem>(cases.twins().device)) {
      const Output o = cases.output(DType::f32, rows, cols);
      const GemmProblem whole{.a = a, .b = b, .out = o.out};
      if (row.name.starts_with("cublaslt") || row.name == "skinny" ||
          (row.name == "exact" && !row.takes(whole, cases.twins().device)))
        continue;
      const bool few_rows = row.name == "few_rows";
      const MutableMatrix all = product_of(few_rows ? 16 : rows, row.name);
      for (const int64_t few : few_rows ? std::vector<int64_t>{1, 2, 4, 5} : std::vector<int64_t>{1, 17}) {
        SCOPED_TRACE(text(row.name, ", ", spec, ", ", few, " rows"));
        expect_first_rows(product_of(few, row.name), all);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(Products, SayWhichRowRuns) {
  if (on_gpu()) GTEST_SKIP() << "which row runs there depends on the GPU";
  ProductCases cases(15);
  const auto explained = [&](const char* x, const char* w, int64_t rows) {
    const Output o = cases.output(DType::f32, rows, 32);
    return explain_choice(
        GemmProblem{.a = cases.operand(x, kRows, rows, 64), .b = cases.operand(w, kRows, 32, 64), .out = o.out},
        cases.twins().device);
  };
  EXPECT_EQ(explained("nvfp4", "mxfp8", 16),
            "skinny: runs\nfew_rows: not asked, skinny comes first\n"
            "cublaslt: cuBLASLt (libcublasLt.so.13 or .12) is not on this machine\n"
            "cublaslt_bf16: cuBLASLt (libcublasLt.so.13 or .12) is not on this machine\n"
            "pipelined_bf16: not asked, skinny comes first\ndecode: not asked, skinny comes first\nexact: takes "
            "4-bit codes, whose block sums are exact "
            "in any order, but an operand is mxfp8\ndecode32: not asked, skinny comes first\n"
            "reference: not asked, skinny comes first\n");
  EXPECT_EQ(explained("nvfp4", "mxfp8", 65),
            "skinny: takes at most 64 rows of a, or 16 for each group on average, but a has 65\n"
            "few_rows: takes at most 16 rows of a, which can have 65; decode reads their codes less often\n"
            "cublaslt: cuBLASLt (libcublasLt.so.13 or .12) is not on this machine\n"
            "cublaslt_bf16: cuBLASLt (libcublasLt.so.13 or .12) is not on this machine\n"
            "pipelined_bf16: runs\ndecode: not asked, pipelined_bf16 comes first\n"
            "exact: takes 4-bit codes, whose block sums are exact in any order, but an operand is mxfp8\n"
            "decode32: not asked, pipelined_bf16 comes first\n"
            "reference: not asked, pipelined_bf16 comes first\n");
  const std::string of_blocks = explained("fp8_block", "mxfp8", 65);
  EXPECT_NE(
      of_blocks.find("\npipelined_bf16: takes codes that are numbers of bfloat16 under the scales of their blocks, "
                     "but scales of fp8_block are float32\ndecode: runs\n"),
      std::string::npos)
      << of_blocks;
}

TEST(Products, OfGroupsWhoseEndsAreOnTheDeviceHaveTheBitsOfTheCpusReference) {
  ProductCases cases(2);
  for (const Recipe& r : kRecipes)
    each_grouped_product(cases, r, [&](const GemmProblem& p, const Output& o) {
      cases.expect_bits(p, o, "reference", [&] { each_group_by(p, reference::gemm); });
    });
  std::cout << cases.compared << " outputs compared\n";
}

TEST(Products, OfGroupsByQuickRowsHaveTheBitsOfTheContractInFloat32) {
  ProductCases cases(16);
  for (const Recipe& r : kRecipes)
    each_grouped_product(cases, r, [&](const GemmProblem& p, const Output& o) { expect_contract(cases, p, o); });
  std::cout << cases.compared << " outputs compared\n";
}

/// Weights, biases and outputs as lists of the host: memory of the device, one by one.
TEST(Products, OfListsHaveTheBitsOfTheCpusReference) {
  ProductCases cases(3);
  for (const char* spec : {"fp8_tensor", "mxfp8", "nvfp4:16x16", "mxfp4:swizzled"})
    for (const int64_t count : {1, 3, 100}) {
      if (count == 100 && spec != std::string_view("nvfp4:16x16")) continue;  // more than a launch takes along
      cases.clear();
      const int64_t each = count == 100 ? 1 : 6;
      std::vector<Side> sides;
      std::vector<Vector> biases;
      for (int64_t e = 0; e < count; ++e) {
        const Operand o = cases.operand(spec, kRows, kOutputs, kInputs);
        sides.push_back({const_cast<void*>(o.data), const_cast<void*>(o.scale), const_cast<float*>(o.amax)});
        biases.push_back(cases.vector(kDTypes[static_cast<size_t>(e) % 3], kOutputs));
      }
      Operand w = cases.operand(spec, kRows, kOutputs, kInputs);
      w.outer = count * kOutputs, w.groups = RowGroups::equal(count, kOutputs), w.each = sides;
      const Output o = cases.output(DType::bf16, count * each, kOutputs, count);
      const RowGroups groups = RowGroups::equal(count, each);
      const GemmProblem p{.a = cases.operand(spec, kRows, count * each, kInputs, groups),
                          .b = w,
                          .out = o.out,
                          .outs = o.each,
                          .biases = biases};
      cases.expect_bits(p, o, "reference", [&] { each_group_by(p, reference::gemm); });
      expect_contract(cases, p, o);
    }
}

TEST(Products, OfGroupsWithBrokenEndsOrTooSmallBuffersRaiseTheErrorOfTheCpu) {
  ProductCases cases(4);
  for (const std::vector<int64_t>& ends : {std::vector<int64_t>{5, 4, 37}, {-1, 4, 37}, {5, 6, 38}, {5, INT32_MAX, 37}})
    for (const Direction d : {kRows, kColumns}) {
      cases.clear();
      const RowGroups sound = cases.groups({5, 6, 37}, kTokens), broken = cases.groups(ends, kTokens);
      const Output o =
          d == kRows ? cases.output(DType::f32, kTokens, kOutputs) : cases.output(DType::f32, 3 * kOutputs, kOutputs);
      GemmProblem p{.a = cases.operand("mxfp8", d, kTokens, d == kRows ? kInputs : kOutputs, sound),
                    .b = d == kRows
                             ? cases.operand("mxfp8", kRows, 3 * kOutputs, kInputs, RowGroups::equal(3, kOutputs))
                             : cases.operand("mxfp8", d, kTokens, kOutputs, sound),
                    .out = o.out};
      GemmProblem bad = p;
      bad.a.groups = broken;
      if (d == kColumns) bad.b.groups = broken;
      cases.twins().expect_same_error(bad);
      for (size_t buffer = 0; buffer < 2; ++buffer) {
        bad = p;
        bad.a.room[buffer] = 7, bad.a.what = "grouped_linear_bwd_dw: dy";
        cases.twins().expect_same_error(bad);
        bad = p;
        bad.b.room[buffer] = 7;
        cases.twins().expect_same_error(bad);
      }
    }
}

/// Nothing is read that one of them does not have, and somebody hears of it.
TEST(Products, OfGroupsThatEndElsewhereInBAreAnErrorOnTheDevice) {
  ProductCases cases(17);
  const Output o = cases.output(DType::f32, 2 * kOutputs, kInputs);
  const GemmProblem p{.a = cases.operand("mxfp8", kColumns, kTokens, kOutputs, cases.groups({5, 20}, kTokens)),
                      .b = cases.operand("mxfp8", kColumns, kTokens, kInputs, cases.groups({6, 21}, kTokens)),
                      .out = o.out};
  for (const KernelRow<GemmProblem>& row : kernels<GemmProblem>(cases.twins().device)) {
    if (!row.takes(p, cases.twins().device)) continue;
    row.run(p, cases.twins().device);
    std::string error;
    try {
      cases.twins().device.synchronize();
    } catch (const Error& e) {
      error = e.what();
    }
    EXPECT_NE(error.find("gemm: the contraction of b for 2 groups of 37 rows of 48 must hold 5 elements, got 6"),
              std::string::npos)
        << row.name << ": " << error;
  }
}

}  // namespace
}  // namespace quire::testing
