// The row "skinny" of both kinds of products: within the bound of tensor cores (numerics.md 7.5), whatever layout codes
// have, and with the same bits of a row in every batch.
#include <iostream>

#include "cuda/grammar.h"
#include "cuda/plain_case.h"
#include "cuda/product_recipes.h"
#include "cuda/tensor_case.h"

namespace quire::testing {
namespace {

constexpr std::string_view kRow = "skinny";

bool takes(ProductCases& cases, const auto& p) {
  for (const auto& row : kernels<std::remove_cvref_t<decltype(p)>>(cases.twins().device))
    if (row.name == kRow) return row.takes(p, cases.twins().device);
  return false;
}

/// More than a cut of each slice, of which the last one is a part.
constexpr int64_t kLength = 1120;

/// Operands of each kind, rows that end in each tile of both kernels, and columns that end within a warp's.
TEST(Skinny, OfEachKindAreWithinTheirBound) {
  ProductCases cases(61);
  size_t turn = 0;
  for (const auto& [x, w] : {std::pair{"fp8_tensor", "fp8_tensor"},
                             {"fp8_block", "fp8_block:128x128"},
                             {"fp8_row", "fp8_block"},
                             {"nvfp4", "mxfp8:swizzled"},
                             {"mxfp8:e5m2", "mxfp4"},
                             {"fp8_block", "mxfp4:swizzled"},
                             {"mxfp4:interleaved", "nvfp4"},
                             {"nvfp4:row_scaled", "nvfp4:swizzled"}})
    for (const int64_t rows : {1, 13, 29, 64}) {
      cases.clear();
      const bool packed = QuantSpec::parse(w).packed();
      const int64_t cols = rows == 13 ? 37 : rows == 64 ? 130 : 9, length = rows == 64 ? 288 : packed ? kLength : 1136;
      const Output o = cases.output(kDTypes[++turn % 3], rows, cols);
      const Vector bias = cases.vector(DType::bf16, cols);
      GemmProblem p{
          .a = cases.operand(x, kRows, rows, length), .b = cases.operand(w, kRows, cols, length), .out = o.out};
      if (turn % 2) p.bias = bias.data, p.bias_dtype = bias.dtype;
      if (turn % 4 == 2) p.addend = o.out.data;
      expect_within(cases, p, o, kRow);
      if (HasFatalFailure()) return;
    }
  std::cout << cases.compared << " outputs compared, off by at most " << worst << " roundings\n";
}

/// Each spec is x, and w if this row takes it there.
TEST(Skinny, OfEverySpecAreWithinTheirBound) {
  ProductCases cases(62);
  std::string other = "mxfp8";
  size_t turn = 0, as_w = 0;
  for (const std::string& spec : whole_grammar()) {
    cases.clear();
    const int64_t rows = 1 + static_cast<int64_t>(++turn % 19), cols = 9,
                  length = 96 + static_cast<int64_t>(turn % 3) * 32;
    const Direction d = turn % 2 ? kRows : kColumns;
    const Output o = cases.output(kDTypes[turn % 3], rows, cols);
    const Operand w = cases.operand(spec, d, d == kRows ? cols : length, d == kRows ? length : cols);
    GemmProblem p{.a = cases.operand(other, kRows, rows, length), .b = w, .out = o.out};
    if (transformed(w)) p.b = cases.operand(spec, kRows, cols, length);
    other = spec;
    if (!takes(cases, p)) p.b = cases.operand("fp8_row", kRows, cols, length), --as_w;
    ++as_w;
    expect_within(cases, p, o, kRow);
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(as_w, turn / 4);
  std::cout << cases.compared << " outputs compared, " << as_w << " of " << turn << " specs as w\n";
}

/// Column j has codes j + shift everywhere: every lane has each of them, also NaN, in every place.
TEST(Skinny, DecodeEveryCodeInEveryLane) {
  ProductCases cases(63);
  cases.numbers = 3;
  for (const char* spec : {"fp8_tensor", "mxfp8", "mxfp4", "nvfp4"})
    for (int64_t shift = 0; shift < 8; ++shift) {
      cases.clear();
      constexpr int64_t rows = 2, cols = 256, length = 160;
      const Operand x = cases.operand("fp8_row", kRows, rows, length), w = cases.operand(spec, kRows, cols, length);
      auto* const codes = static_cast<uint8_t*>(const_cast<void*>(w.data));
      const int64_t bytes = w.room[0] / cols;
      for (int64_t i = 0; i < w.room[0]; ++i) codes[i] = static_cast<uint8_t>(i / bytes + shift);
      const Output o = cases.output(DType::f32, rows, cols);
      expect_within(cases, {.a = x, .b = w, .out = o.out}, o, kRow);
      if (HasFatalFailure()) return;
    }
}

/// One NaN among numbers makes its column NaN and no other one, wherever it is.
TEST(Skinny, FindANaNWhereverItIs) {
  ProductCases cases(64);
  cases.numbers = 3;
  for (const int64_t rows : {3, 20})
    for (const int64_t at : {0, 15, 16, 127, 128, 500, 1119}) {
      cases.clear();
      const int64_t cols = 37, column = at % cols;
      const Operand w = cases.operand("fp8_row", kRows, cols, kLength);
      static_cast<uint8_t*>(const_cast<void*>(w.data))[column * kLength + at] = at % 2 ? 0x7F : 0xFF;
      const Output o = cases.output(DType::f32, rows, cols);
      expect_within(cases, {.a = cases.operand("mxfp8", kRows, rows, kLength), .b = w, .out = o.out}, o, kRow);
      if (HasFatalFailure()) return;
    }
}

/// Every byte of a scale, also the smallest, the largest and NaN.
TEST(Skinny, ScaleByEveryByteOfAScale) {
  ProductCases cases(65);
  cases.numbers = 3;
  for (const char* spec : {"mxfp8", "mxfp4", "nvfp4", "mxfp8:swizzled"})
    for (int64_t shift = 0; shift < 3; ++shift) {
      cases.clear();
      constexpr int64_t rows = 2, cols = 256, length = 160;
      const Operand x = cases.operand("fp8_tensor:given", kRows, rows, length),
                    w = cases.operand(spec, kRows, cols, length);
      auto* const scales = static_cast<uint8_t*>(const_cast<void*>(w.scale));
      const int64_t bytes = w.room[1] / cols;
      for (int64_t i = 0; i < w.room[1]; ++i) scales[i] = static_cast<uint8_t>(i / bytes + shift * 85);
      const Output o = cases.output(DType::f32, rows, cols);
      expect_within(cases, {.a = x, .b = w, .out = o.out}, o, kRow);
      if (HasFatalFailure()) return;
    }
}

struct Groups {
  std::vector<int64_t> ends;  ///< none: equal ones
  int64_t count, rows;
};
/// Empty ones, one of more rows than a block takes at a time, rows of none, and those of the kernel of many rows.
const std::vector<Groups>& all_groups() {
  static const std::vector<Groups> all{{{1, 30, 30, 34}, 4, 37}, {{0, 0, 0}, 3, 9}, {{}, 3, 15},
                                       {{5, 5, 40}, 3, 60},      {{20}, 1, 37},     {{}, 3, 60}};
  return all;
}

TEST(Skinny, OfGroupsAreWithinTheirBound) {
  ProductCases cases(66);
  size_t turn = 0;
  for (const Groups& g : all_groups())
    for (const char* w : {"fp8_block:128x128", "mxfp8", "nvfp4", "mxfp4"}) {
      cases.clear();
      constexpr int64_t cols = 37, length = 288;
      const bool lists = ++turn % 2;
      const RowGroups groups =
          g.ends.empty() ? RowGroups::equal(g.count, g.rows / g.count) : cases.groups(g.ends, g.rows, turn % 3 == 0);
      const RowGroups of_w = RowGroups::equal(g.count, cols);
      const Output o = cases.output(kDTypes[turn % 3], g.rows, cols);
      GemmProblem p{.a = cases.operand(turn % 3 ? "fp8_block" : "nvfp4", kRows, g.rows, length, groups),
                    .b = cases.operand(w, kRows, g.count * cols, length, of_w),
                    .out = o.out};
      std::vector<Side> sides;
      std::vector<Vector> biases;
      for (int64_t e = 0; e < g.count && lists; ++e) {
        const Operand one = cases.operand(w, kRows, cols, length);
        sides.push_back({const_cast<void*>(one.data), const_cast<void*>(one.scale), const_cast<float*>(one.amax)});
        biases.push_back(cases.vector(DType::bf16, cols));
      }
      if (lists) p.b.data = p.b.scale = nullptr, p.b.amax = nullptr, p.b.each = sides, p.biases = biases;
      expect_within(cases, p, o, kRow);
      if (HasFatalFailure()) return;
      const DType dtype = turn % 2 ? DType::bf16 : DType::f32;
      const Output y = cases.output(dtype, g.rows, cols);
      MatmulProblem plain{.a = cases.matrix(DType::bf16, g.rows, length), .b = {}, .transpose_b = true, .out = y.out};
      plain.groups = groups, plain.codes = cases.operand(w, kRows, g.count * cols, length, of_w);
      plain.b.dtype = dtype;
      if (turn % 3 == 0) plain.bias = cases.vector(DType::f32, g.count * cols);
      expect_within(cases, plain, y, kRow);
      if (HasFatalFailure()) return;
    }
  std::cout << cases.compared << " outputs compared\n";
}

/// The gradient of x: weights columnwise, whose rows are contracted in each group.
TEST(Skinny, OfColumnwiseWeightsAreWithinTheirBound) {
  ProductCases cases(71);
  for (const Groups& g : all_groups())
    for (const char* w : {"fp8_tensor", "fp8_block:128x128", "nvfp4"}) {
      cases.clear();
      constexpr int64_t cols = 37, length = 160;
      const RowGroups groups =
          g.ends.empty() ? RowGroups::equal(g.count, g.rows / g.count) : cases.groups(g.ends, g.rows);
      const Output o = cases.output(DType::f32, g.rows, cols);
      expect_within(cases,
                    {.a = cases.operand("mxfp8:e5m2", kRows, g.rows, length, groups),
                     .b = cases.operand(w, kColumns, g.count * length, cols, RowGroups::equal(g.count, length)),
                     .out = o.out},
                    o, kRow);
      if (HasFatalFailure()) return;
    }
}

TEST(Skinny, OfPlainRowsAreWithinTheirBound) {
  ProductCases cases(67);
  size_t turn = 0;
  for (const char* spec : {"fp8_tensor", "fp8_row", "fp8_block", "mxfp8:swizzled", "mxfp8:32x32", "mxfp4", "nvfp4",
                           "nvfp4:row_scaled", "nvfp4:global=div", "nvfp4:global=mul"})
    for (const int64_t rows : {1, 16, 33}) {
      cases.clear();
      const int64_t cols = 21, length = rows == 33 ? 160 : kLength;
      const DType dtype = ++turn % 2 ? DType::bf16 : DType::f32;
      const Output y = cases.output(dtype, rows, cols);
      MatmulProblem p{.a = cases.matrix(DType::bf16, rows, length), .b = {}, .transpose_b = true, .out = y.out};
      p.codes = cases.operand(spec, kRows, cols, length), p.b.dtype = dtype;
      if (turn % 4 == 0) p.bias = cases.vector(DType::f32, cols);
      expect_within(cases, p, y, kRow);
      if (HasFatalFailure()) return;
    }
  std::cout << cases.compared << " outputs compared\n";
}

/// The first rows of a batch and the first columns of a weight alone give the bits that they have in it: in both
/// kernels.
TEST(Skinny, OfARowDoNotDependOnItsBatchNorOnOtherColumns) {
  ProductCases cases(68);
  constexpr int64_t rows = 64, cols = 70;
  for (const char* spec : {"fp8_block", "mxfp8", "mxfp4:swizzled", "nvfp4"}) {
    cases.clear();
    const Operand x = cases.operand(spec, kRows, rows, kLength), w = cases.operand(spec, kRows, cols, kLength);
    const Matrix plain = cases.matrix(DType::bf16, rows, kLength);
    const auto product_of = [&](int64_t m, int64_t n, bool of_codes) {
      const Output o = cases.output(DType::f32, m, n);
      Operand a = x, b = w;
      a.outer = m;
      if (spec != std::string_view("fp8_block")) b.outer = n;  // whose scales lie across
      MatmulProblem p{.a = plain, .b = {}, .transpose_b = true, .out = o.out};
      p.a.rows = m, p.codes = b, p.b.dtype = DType::f32;
      if (of_codes)
        cases.run(GemmProblem{.a = a, .b = b, .out = o.out}, kRow);
      else
        cases.run(p, kRow);
      return o.out;
    };
    for (const bool of_codes : {true, false}) {
      if (spec == std::string_view("fp8_block") && of_codes) continue;
      const MutableMatrix all = product_of(rows, cols, of_codes);
      for (const int64_t m : {1, 2, 8, 9, 16, 17, 40}) {
        const int64_t n = spec == std::string_view("fp8_block") ? cols : cols - m;
        const MutableMatrix some = product_of(m, n, of_codes);
        for (int64_t i = 0; i < m; ++i)
          for (int64_t j = 0; j < n; ++j)
            ASSERT_EQ(load_element(some.data, DType::f32, i * some.row_stride + j),
                      load_element(all.data, DType::f32, i * all.row_stride + j))
                << spec << ", " << m << " rows, at " << i << ", " << j;
      }
    }
  }
}

TEST(Skinny, TakesFewInstructionsForAWeight) {
  struct Counted {
    const char* spec;
    double most;  ///< instructions of PTX of all threads, for each weight
  };
  for (const Counted& c : {Counted{"fp8_row", 8}, Counted{"mxfp8", 9}, Counted{"mxfp4", 7.5}, Counted{"nvfp4", 7.5}})
    for (const int64_t rows : {1, 16, 64}) {
      constexpr int64_t cols = 128, step = 2048;
      const auto steps_of = [&](int64_t length) {
        ProductCases cases(69);
        const Output o = cases.output(DType::bf16, rows, cols);
        auto* const x = cases.twins().array(std::vector<uint16_t>(static_cast<size_t>(rows * length), 0x3F80));
        MatmulProblem p{.a = {x, DType::bf16, rows, length, length}, .b = {}, .transpose_b = true, .out = o.out};
        p.codes = cases.operand(c.spec, kRows, cols, length), p.b.dtype = DType::bf16;
        cases.run(p, kRow);
        return static_cast<double>(cases.twins().device.steps());
      };
      const double few = (steps_of(2 * step) - steps_of(step)) / (cols * step);
      std::cout << c.spec << ", " << rows << " rows: " << few << " instructions a weight\n";
      if (on_gpu()) continue;
      EXPECT_LT(few, rows <= 16 ? c.most : c.most + 10) << c.spec;
    }
}

TEST(Skinny, RefusesWhatItCannotRead) {
  ProductCases cases(70);
  const auto why = [&](const char* x, const char* w, int64_t rows, int64_t length) {
    const Output o = cases.output(DType::f32, rows, 9);
    const GemmProblem p{
        .a = cases.operand(x, kRows, rows, length), .b = cases.operand(w, kRows, 9, length), .out = o.out};
    Refusal refusal;
    for (const KernelRow<GemmProblem>& row : kernels<GemmProblem>(cases.twins().device))
      if (row.name == kRow) row.takes(p, cases.twins().device, &refusal);
    return refusal.why;
  };
  EXPECT_EQ(why("mxfp8", "mxfp8", 64, 96), "");
  EXPECT_EQ(why("mxfp8", "mxfp8", 65, 96), "takes at most 64 rows of a, or 16 for each group on average, but a has 65");
  EXPECT_EQ(why("mxfp8", "mxfp8:interleaved", 1, 96),
            "reads the codes of a column one after another, but those of mxfp8:interleaved are interleaved");
  EXPECT_EQ(why("mxfp8", "mxfp8:e5m2", 1, 96), "decodes E4M3 and E2M1 in columns, but they are mxfp8:e5m2");
  EXPECT_EQ(why("mxfp8", "mxfp8", 1, 100), "reads columns by 16 bytes, below 2^28 codes, but they have 100 bytes");
}

}  // namespace
}  // namespace quire::testing
