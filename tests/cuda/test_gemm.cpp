// Products on the CUDA device: the reference's bits are those of the CPU's reference, in double; the other rows give
// the bits of numerics.md 7.4 in float32.
#include <iostream>

#include "cuda/product_case.h"

namespace quire::testing {
namespace {

struct Recipe {
  const char *x, *w, *dy;
};
/// Those of numerics.md 6.4 with their options, and specs that no recipe has.
constexpr std::array kRecipes{
    Recipe{"fp8_tensor:nan", "fp8_tensor:nan", "fp8_tensor:e5m2:nan"},
    Recipe{"fp8_tensor:given", "fp8_tensor:pow2", "fp8_tensor"},
    Recipe{"fp8_row", "fp8_row:pow2", "fp8_row:e5m2"},
    Recipe{"fp8_block:pow2:nan", "fp8_block:128x128:pow2:nan", "fp8_block:pow2:nan"},
    Recipe{"fp8_block", "fp8_block", "fp8_block:e5m2:128x128"},
    Recipe{"mxfp4:nan", "mxfp4:nan", "mxfp8:nan"},
    Recipe{"mxfp8", "mxfp4", "mxfp8:e5m2"},
    Recipe{"mxfp8:nan", "mxfp8:nan", "mxfp8:nan"},
    Recipe{"mxfp8", "mxfp8:32x32", "mxfp8:e5m2"},
    Recipe{"nvfp4:rht:nan", "nvfp4:16x16:nan", "nvfp4:rht:sr:nan"},
    Recipe{"nvfp4", "nvfp4", "nvfp4:sr"},
    Recipe{"nvfp4:row_scaled", "nvfp4:4over6=mae:256", "nvfp4:rht=unsigned"},
    Recipe{"nvfp4:global=div", "nvfp4:global=mul", "nvfp4"},
    Recipe{"nvfp4", "mxfp8", "fp8_tensor"},
    Recipe{"mxfp8:swizzled", "mxfp8:swizzled", "mxfp8:e5m2:swizzled"},
    Recipe{"nvfp4:rht:swizzled", "nvfp4:16x16:swizzled", "nvfp4:rht:sr:swizzled"},
    Recipe{"mxfp8:interleaved", "mxfp8:interleaved", "mxfp8:interleaved"},
    Recipe{"nvfp4:rht:interleaved", "nvfp4:16x16:interleaved", "nvfp4:rht:interleaved"},
    Recipe{"mxfp4:interleaved", "fp8_block:interleaved", "fp8_row:interleaved"},
};

/// Operands of the three products of a Linear.
std::array<std::array<Operand, 2>, 3> products(ProductCases& cases, const Recipe& r, const Shape3& s, uint64_t kind) {
  cases.numbers = kind;
  return {{{cases.operand(r.x, kRows, s.m, s.k), cases.operand(r.w, kRows, s.n, s.k)},
           {cases.operand(r.dy, kRows, s.m, s.n), cases.operand(r.w, kColumns, s.n, s.k)},
           {cases.operand(r.dy, kColumns, s.m, s.n), cases.operand(r.x, kColumns, s.m, s.k)}}};
}

bool transformed(const Operand& o) { return o.direction == kColumns && o.spec.hadamard != Hadamard::off; }

/// Calls each(problem, output) with products of every recipe, with every option in turn; `step`: 2 for half of them.
template <class Each>
void each_product(ProductCases& cases, uint64_t step, const Each& each) {
  uint64_t turn = 0;
  for (const Recipe& r : kRecipes)
    for (const Shape3& s : kShapes) {
      if (++turn % step != 0) continue;
      cases.clear();
      const uint64_t kind = cases.die(4);
      for (const auto& [a, b] : products(cases, r, s, kind)) {
        if (transformed(a) != transformed(b)) continue;
        const Output o = cases.output(kDTypes[turn % 3], a.outer, b.outer);
        GemmProblem p{.a = a, .b = b, .out = o.out};
        if (cases.die(2)) {
          const Vector bias = cases.vector(kDTypes[cases.die(3)], b.outer);
          p.bias = bias.data, p.bias_dtype = bias.dtype;
        }
        const Output other = cases.output(o.out.dtype, a.outer, o.out.row_stride);
        if (const uint64_t added = cases.die(4); added < 2) p.addend = added ? o.out.data : other.out.data;
        each(p, o);
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
}

TEST(Products, OfTheReferenceHaveTheBitsOfTheCpusForEverySpecOfARecipe) {
  ProductCases cases(1);
  each_product(cases, 2, [&](const GemmProblem& p, const Output& o) {
    cases.expect_bits(p, o, "reference", [&] { reference::gemm(p); });
  });
  std::cout << cases.compared << " outputs compared\n";
}

/// The rows that sum in float32 as the contract orders it, which take `p`.
std::vector<std::string_view> quick_rows(ProductCases& cases, const GemmProblem& p) {
  std::vector<std::string_view> found;
  for (const KernelRow<GemmProblem>& row : kernels<GemmProblem>(cases.twins().device))
    if ((row.name == "few_rows" || row.name == "decode32") && row.takes(p, cases.twins().device))
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

/// The first rows of a batch alone give the bits that they have in it, by whichever row of the table takes both. (Rows
/// of the table may differ from each other: numerics.md 7.6.)
TEST(Products, OfARowDoNotDependOnItsBatch) {
  ProductCases cases(14);
  for (const char* spec : {"fp8_row", "mxfp8", "nvfp4:row_scaled", "mxfp4:swizzled", "fp8_tensor"})
    for (const KernelRow<GemmProblem>& row : kernels<GemmProblem>(cases.twins().device)) {
      cases.clear();
      constexpr int64_t rows = 66, cols = 16, length = 144;
      Operand a = cases.operand(spec, kRows, rows, length);
      const Operand b = cases.operand(spec, kRows, cols, length);
      const Output all = cases.output(DType::f32, rows, cols + 16);
      std::vector<float> batch;
      for (const int64_t count : {66, 17, 16, 5, 4, 2, 1}) {
        a.outer = count;
        const GemmProblem p{.a = a, .b = b, .out = {all.out.data, DType::f32, count, cols, cols + 16}};
        if (!row.takes(p, cases.twins().device)) continue;
        cases.run(p, row.name);
        const auto* const out = static_cast<const float*>(all.out.data);
        if (batch.empty()) batch.assign(out, out + count * (cols + 16));
        for (int64_t i = 0; i < count; ++i)
          for (int64_t j = 0; j < cols; ++j)
            ASSERT_EQ(out[i * (cols + 16) + j], batch[static_cast<size_t>(i * (cols + 16) + j)])
                << spec << " by " << row.name << ", " << count << " rows, at " << i << ", " << j;
      }
    }
}

TEST(Products, SayWhichRowRuns) {
  if (on_gpu()) GTEST_SKIP() << "which row runs there depends on the GPU";
  ProductCases cases(15);
  const Operand w = cases.operand("mxfp8", kRows, 32, 64);
  const auto explained = [&](int64_t rows) {
    const Output o = cases.output(DType::f32, rows, 32);
    return explain_choice(GemmProblem{.a = cases.operand("nvfp4", kRows, rows, 64), .b = w, .out = o.out},
                          cases.twins().device);
  };
  EXPECT_EQ(explained(16),
            "few_rows: runs\n"
            "cublaslt: cuBLASLt (libcublasLt.so.13 or .12) is not on this machine\n"
            "decode32: not asked, few_rows comes first\n"
            "reference: not asked, few_rows comes first\n");
  EXPECT_EQ(explained(17),
            "few_rows: takes at most 16 rows of a, which can have 17; decode32 reads their codes less "
            "often\ncublaslt: cuBLASLt (libcublasLt.so.13 or .12) is not on this machine\n"
            "decode32: runs\nreference: not asked, decode32 comes first\n");
}

/// The three grouped products of a recipe: what a row must give each of them, for every grouping.
template <class Each>
void each_grouped_product(ProductCases& cases, const Recipe& r, const Each& each) {
  for (const Grouping& g : groupings()) {
    SCOPED_TRACE(g.what);
    const int64_t count = std::ssize(g.ends);
    {
      const uint64_t turn = cases.die(4);
      cases.clear();
      const RowGroups groups = cases.groups(g.ends, kTokens, g.wide), weights = RowGroups::equal(count, kOutputs);
      const DType dtype = kDTypes[turn % 3];
      const Vector bias = cases.vector(DType::bf16, count * kOutputs);
      const Output y = cases.output(dtype, kTokens, kOutputs), dx = cases.output(dtype, kTokens, kInputs);
      GemmProblem fprop{.a = cases.operand(r.x, kRows, kTokens, kInputs, groups),
                        .b = cases.operand(r.w, kRows, count * kOutputs, kInputs, weights),
                        .out = y.out,
                        .addend = turn == 1 ? y.out.data : nullptr};
      if (turn % 2) fprop.bias = bias.data, fprop.bias_dtype = bias.dtype;
      each(fprop, y);
      each(GemmProblem{.a = cases.operand(r.dy, kRows, kTokens, kOutputs, groups),
                       .b = cases.operand(r.w, kColumns, count * kOutputs, kInputs, weights),
                       .out = dx.out},
           dx);
      const Operand dy = cases.operand(r.dy, kColumns, kTokens, kOutputs, groups),
                    x = cases.operand(r.x, kColumns, kTokens, kInputs, groups);
      if (transformed(dy) != transformed(x)) continue;
      const Output dw = cases.output(dtype, count * kOutputs, kInputs, turn == 2 ? 0 : count);
      each(GemmProblem{.a = dy, .b = x, .out = dw.out, .addend = turn % 2 ? dw.out.data : nullptr, .outs = dw.each},
           dw);
    }
  }
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
  const GemmProblem p{.a = cases.operand("mxfp8", kColumns, kTokens, kOutputs, cases.groups({5, 37}, kTokens)),
                      .b = cases.operand("mxfp8", kColumns, kTokens, kInputs, cases.groups({6, 37}, kTokens)),
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
