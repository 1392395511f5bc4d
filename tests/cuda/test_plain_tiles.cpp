// Plain products by kernels of the CUDA device: within the bounds of numerics.md 7.5.
#include <iostream>

#include "cuda/plain_case.h"

namespace quire::testing {
namespace {

/// The rows that multiply by kernels of their own and take `p`.
std::vector<std::string_view> own_rows(ProductCases& cases, const MatmulProblem& p) {
  std::vector<std::string_view> found;
  for (const KernelRow<MatmulProblem>& row : kernels<MatmulProblem>(cases.twins().device))
    if (row.name != "reference" && row.name != "library" && row.takes(p, cases.twins().device))
      found.push_back(row.name);
  return found;
}

void expect_within(ProductCases& cases, const MatmulProblem& p, const Output& o) {
  for (const std::string_view row : own_rows(cases, p)) expect_within(cases, p, o, row);
}

/// Numbers of every dtype in one or both operands, each way round, in rows that are aligned and in others.
TEST(PlainProducts, OfOneTensorAreWithinTheirBound) {
  ProductCases cases(31);
  int64_t turn = 0;
  for (const Shape3& s : kShapes)
    for (const bool ta : {false, true})
      for (const bool tb : {false, true}) {
        cases.clear();
        const DType out = kDTypes[static_cast<size_t>(++turn) % 3];
        const auto dtype = [&] { return cases.die(2) ? out : kDTypes[cases.die(3)]; };
        const uint64_t kind = cases.die(3);
        const Matrix a = ta ? cases.matrix(dtype(), s.k, s.m, kind) : cases.matrix(dtype(), s.m, s.k, kind);
        const Matrix b = tb ? cases.matrix(dtype(), s.n, s.k, kind) : cases.matrix(dtype(), s.k, s.n, kind);
        const Output o = cases.output(out, s.m, s.n);
        const Vector bias = turn % 2 ? cases.vector(kDTypes[cases.die(3)], s.n) : Vector{};
        expect_within(cases, {.a = a, .b = b, .transpose_a = ta, .transpose_b = tb, .bias = bias, .out = o.out}, o);
        if (HasFatalFailure()) return;
      }
  std::cout << cases.compared << " outputs compared\n";
}

TEST(PlainProducts, OfGroupsWhoseEndsAreOnTheDeviceAreWithinTheirBound) {
  ProductCases cases(32);
  size_t place = 0;
  for (const Grouping& g : groupings())
    for (size_t turn = ++place % 3; turn < 6; turn += 3) {
      cases.clear();
      SCOPED_TRACE(text(g.what, ", turn ", turn));
      const DType dtype = kDTypes[turn % 3];
      const bool odd = turn % 2;
      const GroupedForm form{dtype, odd ? DType::bf16 : dtype, odd ? dtype : DType::f32, dtype, turn >= 3, odd};
      each_grouped(cases, g, form, [&](const MatmulProblem& p, const Output& o) { expect_within(cases, p, o); });
      if (HasFatalFailure()) return;
    }
  std::cout << cases.compared << " outputs compared\n";
}

/// Some steps of a contraction and a part of one, of a whole tile: every lane has outputs.
TEST(PlainProducts, OfAWholeTileAreWithinTheirBound) {
  ProductCases cases(38);
  constexpr int64_t length = 166;
  for (const auto& [ta, tb] : {std::pair{false, true}, {false, false}, {true, false}}) {
    cases.clear();
    const Output o = cases.output(DType::bf16, 64, 64);
    const auto matrix = [&](bool transposed) {
      return transposed ? cases.matrix(DType::bf16, length, 64) : cases.matrix(DType::bf16, 64, length);
    };
    expect_within(cases, {.a = matrix(ta), .b = matrix(!tb), .transpose_a = ta, .transpose_b = tb, .out = o.out}, o,
                  "tiles");
  }
  cases.clear();
  const Output o = cases.output(DType::bf16, 64, 64);
  MatmulProblem p{.a = cases.matrix(DType::bf16, 64, length), .b = {}, .transpose_b = true, .out = o.out};
  p.codes = cases.operand("nvfp4:row_scaled", kRows, 64, length);
  expect_within(cases, p, o, "tiles");
}

/// Weights in codes, by lines and across them; each spec that scales or stores codes in a way of its own.
TEST(PlainProducts, OfWeightsInCodesAreWithinTheirBound) {
  ProductCases cases(33);
  size_t turn = 0;
  for (const char* spec : {"fp8_tensor",
                           "fp8_tensor:e5m2",
                           "fp8_row",
                           "fp8_row:interleaved",
                           "fp8_block",
                           "fp8_block:128x128:e5m2",
                           "mxfp8",
                           "mxfp8:swizzled",
                           "mxfp8:32x32",
                           "mxfp8:interleaved",
                           "mxfp4",
                           "mxfp4:interleaved",
                           "nvfp4",
                           "nvfp4:16x16",
                           "nvfp4:swizzled",
                           "nvfp4:interleaved",
                           "nvfp4:row_scaled",
                           "nvfp4:4over6=mae:256",
                           "nvfp4:global=div",
                           "nvfp4:global=mul"})
    for (const bool transposed : {true, false}) {
      cases.clear();
      const Grouping& g = groupings()[++turn % groupings().size()];
      const bool grouped = turn % 3 != 0;
      const int64_t count = grouped ? std::ssize(g.ends) : 1;
      const int64_t tokens = turn % 2 ? 37 : 7, out = 17 + static_cast<int64_t>(turn % 5), in = 145;
      const int64_t rows = transposed ? out : in, cols = transposed ? in : out;
      {
        const DType dtype = kDTypes[turn % 3];
        const Output y = cases.output(dtype, kTokens, out);
        MatmulProblem p{.a = cases.matrix(dtype, kTokens, in),
                        .b = {},
                        .transpose_b = transposed,
                        .out = y.out,
                        .codes = cases.operand(spec, kRows, count * rows, cols,
                                               grouped ? RowGroups::equal(count, rows) : RowGroups{})};
        if (grouped) p.groups = cases.groups(g.ends, kTokens, g.wide);
        if (!grouped) p.a.rows = p.out.rows = tokens;
        SCOPED_TRACE(text(spec, transposed ? " transposed" : ""));
        expect_within(cases, p, y);
        if (HasFatalFailure()) return;
      }
    }
  std::cout << cases.compared << " outputs compared\n";
}

/// Every byte is some code, also those that no quantizer writes: infinite ones and NaN.
TEST(PlainProducts, DecodeEveryCode) {
  ProductCases cases(34);
  size_t turn = 0;
  for (const char* spec : {"fp8_tensor", "fp8_tensor:e5m2", "mxfp8", "mxfp4", "nvfp4"})
    for (const DType dtype : {kDTypes[++turn % 3], kDTypes[(turn + 1) % 3]}) {
      cases.clear();
      const Operand w = cases.operand(spec, kRows, 256, 8);
      auto* const codes = static_cast<uint8_t*>(const_cast<void*>(w.data));
      for (int64_t i = 0; i < w.room[0]; ++i) codes[i] = static_cast<uint8_t>(i);
      const Output y = cases.output(dtype, 3, 256);
      expect_within(cases, {.a = cases.matrix(dtype, 3, 8, 3), .b = {}, .transpose_b = true, .out = y.out, .codes = w},
                    y);
      if (HasFatalFailure()) return;
    }
}

/// Weights in codes and groups of matrices, whose lines are vectors of 16 bytes or not.
TEST(PlainProducts, OfFewRowsAreWithinTheirBound) {
  ProductCases cases(37);
  size_t turn = 0;
  for (const char* spec : {"", "fp8_row", "fp8_block:e5m2", "mxfp8:interleaved", "mxfp8:swizzled", "mxfp4", "nvfp4",
                           "nvfp4:row_scaled", "nvfp4:global=div"})
    for (const int64_t length : {1296, 145, 1024})
      for (const bool grouped : {false, true}) {
        cases.clear();
        const int64_t rows = std::array{16, 1, 9, 8, 5}[++turn % 5], out = 21, count = grouped ? 3 : 1;
        const DType dtype = turn % 2 ? DType::bf16 : DType::f16;
        const Output y = cases.output(dtype, grouped ? 3 * 5 : rows, out);
        MatmulProblem p{.a = cases.matrix(dtype, y.out.rows, length), .b = {}, .transpose_b = true, .out = y.out};
        if (grouped && turn % 3)
          p.groups = cases.groups({4, 4, 13}, 15, turn % 2);
        else if (grouped)
          p.groups = RowGroups::equal(3, 5);
        if (*spec)
          p.codes = cases.operand(spec, kRows, count * out, length, grouped ? RowGroups::equal(3, out) : RowGroups{});
        else
          p.b = cases.matrix(dtype, count * out, length);
        if (turn % 4 == 0) p.bias = cases.vector(DType::f32, count * out);
        if (!*spec && !grouped) continue;
        SCOPED_TRACE(text(spec, ", ", length));
        expect_within(cases, p, y, "few_rows");
        if (HasFatalFailure()) return;
      }
  std::cout << cases.compared << " outputs compared\n";
}

TEST(PlainProducts, OfFewRowsTakeFewInstructionsForAWeight) {
  struct Counted {
    const char* spec;
    double most;  ///< instructions of PTX of all threads, for each weight
  };
  for (const Counted& c : {Counted{"fp8_row", 16}, Counted{"mxfp4", 16}, Counted{"nvfp4", 16}})
    for (const int64_t rows : {1, 16}) {
      constexpr int64_t cols = 16, step = 1024;
      const auto steps_of = [&](int64_t length) {
        ProductCases cases(39);
        const Output o = cases.output(DType::bf16, rows, cols);
        auto* const x = cases.twins().array(std::vector<uint16_t>(static_cast<size_t>(rows * length), 0x3F80));
        cases.run(MatmulProblem{.a = {x, DType::bf16, rows, length, length},
                                .b = {},
                                .transpose_b = true,
                                .out = o.out,
                                .codes = cases.operand(c.spec, kRows, cols, length)},
                  "few_rows");
        return static_cast<double>(cases.twins().device.steps());
      };
      const double few = (steps_of(3 * step) - steps_of(2 * step)) / (cols * step);
      std::cout << c.spec << ", " << rows << " rows: " << few << " instructions a weight\n";
      if (on_gpu()) continue;
      EXPECT_LT(few, c.most) << c.spec;
    }
}

/// The first rows of a batch alone give the bits that they have in it.
TEST(PlainProducts, OfARowDoNotDependOnItsBatch) {
  ProductCases cases(35);
  constexpr int64_t cols = 70;
  struct Batches {
    const char* row;
    int64_t all, length;
    std::vector<int64_t> few;
  };
  for (const auto& [row, rows, length, batches] :
       {Batches{"few_rows", 16, 1300, {1, 2, 8, 9}}, Batches{"tiles", 66, 300, {1, 17}},
        Batches{"tiles32", 66, 200, {17}}})
    for (const char* spec : {"", "nvfp4"}) {
      const DType dtype = *spec ? DType::bf16 : DType::f16;
      cases.clear();
      MatmulProblem all{.a = cases.matrix(dtype, rows, length), .b = {}, .transpose_b = true, .out = {}};
      if (*spec)
        all.codes = cases.operand(spec, kRows, cols, length);
      else
        all.b = cases.matrix(dtype, cols, length);
      const auto run = [&](int64_t some) {
        MatmulProblem p = all;
        p.a.rows = some, p.out = cases.output(dtype, some, cols).out;
        if (!*spec) p.groups = cases.groups({some}, some);
        cases.run(p, row);
        return p.out;
      };
      const MutableMatrix whole = run(rows);
      for (const int64_t few : batches) {
        const MutableMatrix some = run(few);
        for (int64_t i = 0; i < few; ++i)
          for (int64_t j = 0; j < cols; ++j)
            ASSERT_EQ(load_element(some.data, dtype, i * some.row_stride + j),
                      load_element(whole.data, dtype, i * whole.row_stride + j))
                << row << ", " << spec << ", " << few << " rows, at " << i << ", " << j;
      }
    }
}

TEST(PlainProducts, OfLargeTilesAreWithinTheirBoundAndTakeFewInstructions) {
  struct Counted {
    const char* spec;  ///< of b; empty: none
    bool transpose_a, transpose_b;
    double most;  ///< instructions of PTX that a thread runs for each 16 x 8 x 16 that its warp multiplies
  };
  for (const Counted& c : {Counted{"", false, true, 14}, Counted{"", false, false, 15}, Counted{"", true, false, 16},
                           Counted{"fp8_row", false, true, 22}, Counted{"fp8_block:128x128", false, false, 26},
                           Counted{"mxfp8", false, true, 22}, Counted{"nvfp4", false, true, 22},
                           Counted{"nvfp4:16x16", false, false, 26}}) {
    constexpr int64_t rows = 256, cols = 128;
    const auto steps_of = [&](int64_t length) {
      ProductCases cases(36);
      const auto aligned = [&](int64_t m, int64_t n) {
        Matrix x = cases.matrix(DType::bf16, m, n + 8);
        auto* const to = cases.twins().room<std::byte>(m * n * 2);
        for (int64_t i = 0; i < m; ++i)
          for (int64_t j = 0; j < n; ++j)
            store_element(to, DType::bf16, i * n + j, load_element(x.data, x.dtype, i * x.row_stride + j));
        return Matrix{to, DType::bf16, m, n, n};
      };
      const int64_t b_rows = c.transpose_b ? cols : length, b_cols = c.transpose_b ? length : cols;
      const Output o = cases.output(DType::bf16, rows, cols);
      MatmulProblem p{.a = c.transpose_a ? aligned(length, rows) : aligned(rows, length),
                      .b = {},
                      .transpose_a = c.transpose_a,
                      .transpose_b = c.transpose_b,
                      .out = o.out};
      if (*c.spec)
        p.codes = cases.operand(c.spec, kRows, b_rows, b_cols);
      else
        p.b = aligned(b_rows, b_cols);
      if (length == 128)
        expect_within(cases, p, o, "tiles");
      else
        cases.run(p, "tiles");
      return static_cast<double>(cases.twins().device.steps());
    };
    const double few = (steps_of(256) - steps_of(128)) / (rows * cols * 128 / (16 * 8 * 16)) / 32;
    std::cout << (*c.spec ? c.spec : "bfloat16") << (c.transpose_a ? ", a across" : "")
              << (c.transpose_b ? "" : ", b across") << ": " << few << " instructions a multiplication\n";
    if (on_gpu()) continue;
    EXPECT_LT(few, c.most) << c.spec;
  }
}

}  // namespace
}  // namespace quire::testing
