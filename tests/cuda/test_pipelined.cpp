// Plain products by the row "pipelined": within its bound of numerics.md 7.5, whichever rows its operands have.
#include <iostream>

#include "cuda/plain_case.h"

namespace quire::testing {
namespace {

/// Whether a and b are transposed, as the products of a Linear have it.
struct Form {
  bool a, b;
};
constexpr std::array kForms{Form{false, true}, Form{false, false}, Form{true, false}};

/// A product of aligned matrices, whose rows have `more` numbers.
MatmulProblem product(ProductCases& cases, const Form& form, DType dtype, const Shape3& s, int64_t more = 0) {
  MatmulProblem p{.a = form.a ? cases.aligned(dtype, s.k, s.m, more) : cases.aligned(dtype, s.m, s.k, more),
                  .b = form.b ? cases.aligned(dtype, s.n, s.k, more) : cases.aligned(dtype, s.k, s.n, more),
                  .transpose_a = form.a,
                  .transpose_b = form.b,
                  .out = {}};
  return p;
}

/// Parts of a tile, and of a step of the contraction; several tiles, narrow ones and wide ones.
TEST(Pipelined, ProductsOfEveryShapeAreWithinTheirBound) {
  ProductCases cases(51);
  int64_t turn = 0;
  for (const Shape3& s : {Shape3{8, 16, 40}, Shape3{136, 72, 136}, Shape3{72, 200, 8}, Shape3{64, 128, 0},
                          Shape3{72, 1032, 72}, Shape3{0, 8, 16}})
    for (const Form& form : kForms) {
      cases.clear();
      const DType dtype = ++turn % 2 ? DType::bf16 : DType::f16;
      const DType out = turn % 5 == 0 ? DType::f32 : dtype;
      MatmulProblem p = product(cases, form, dtype, s, turn % 4 == 0 ? 8 : 0);
      const Output o = cases.output(out, s.m, s.n);
      p.out = o.out;
      if (turn % 2) p.bias = cases.vector(kDTypes[static_cast<size_t>(turn) % 3], s.n);
      expect_within(cases, p, o, "pipelined");
      if (HasFatalFailure()) return;
    }
  std::cout << cases.compared << " outputs compared\n";
}

/// Outputs in rows that are vectors of 16 bytes, as those of layers are, and of every dtype.
TEST(Pipelined, OutputsAreStoredInVectors) {
  ProductCases cases(52);
  for (const DType out : {DType::bf16, DType::f16, DType::f32}) {
    cases.clear();
    MatmulProblem p = product(cases, kForms[0], out == DType::f16 ? DType::f16 : DType::bf16, {72, 136, 40});
    const Matrix y = cases.aligned(out, 72, 136);
    p.out = {const_cast<void*>(y.data), out, 72, 136, 136};
    p.bias = cases.vector(DType::f32, 136);
    Output o;
    o.out = p.out, o.bytes = 72 * 136 * size_of(out);
    expect_within(cases, p, o, "pipelined");
  }
}

/// Groups that end within a tile, that are empty, and that are longer than a strip of tiles is not: of rows of the
/// result, and of the contraction.
TEST(Pipelined, ProductsOfGroupsAreWithinTheirBound) {
  ProductCases cases(53);
  constexpr int64_t tokens = 150, in = 48, out = 24;
  size_t turn = 0;
  for (const std::vector<int64_t>& ends : {std::vector<int64_t>{140, 140, 150}, {0, 0, 7}, {0, 0, 0}, {50, 100, 150}})
    for (const Form& form : kForms) {
      cases.clear();
      const auto count = std::ssize(ends);
      const DType dtype = ++turn % 2 ? DType::bf16 : DType::f16;
      const bool lists = turn % 4 >= 2;
      MatmulProblem p{.a = cases.aligned(dtype, tokens, form.a ? out : in),
                      .b = {},
                      .transpose_a = form.a,
                      .transpose_b = form.b,
                      .out = {},
                      .groups = cases.groups(ends, tokens, turn % 3 == 0)};
      std::vector<Matrix> list;
      if (form.a)
        p.b = cases.aligned(dtype, tokens, in);
      else
        p.b = form.b ? cases.aligned(dtype, count * out, in) : cases.aligned(dtype, count * in, out);
      if (lists && !form.a) {
        for (int64_t e = 0; e < count; ++e)
          list.push_back(form.b ? cases.aligned(dtype, out, in, 8 * e) : cases.aligned(dtype, in, out, 8 * e));
        p.bs = list;
      }
      const Output o =
          form.a ? cases.output(dtype, count * out, in, lists ? count : 0) : cases.output(dtype, tokens, out);
      p.out = o.out;
      if (form.a) p.outs = o.each;
      if (!form.a && turn % 2) p.bias = cases.vector(DType::f32, count * out);
      SCOPED_TRACE(text("turn ", turn));
      expect_within(cases, p, o, "pipelined");
      if (HasFatalFailure()) return;
    }
  std::cout << cases.compared << " outputs compared\n";
}

/// Weights in codes are decoded first, those of a list one by one.
TEST(Pipelined, ProductsOfWeightsInCodesAreWithinTheirBound) {
  ProductCases cases(54);
  size_t turn = 0;
  for (const char* spec : {"fp8_row", "fp8_block:128x128", "mxfp8:swizzled", "mxfp4:interleaved", "nvfp4:16x16"})
    for (const bool transposed : {true, false}) {
      cases.clear();
      const int64_t out = 24, in = 136, count = ++turn % 2 ? 3 : 1;
      const int64_t rows = transposed ? out : in, cols = transposed ? in : out;
      const DType dtype = turn % 3 ? DType::bf16 : DType::f16;
      const Output y = cases.output(dtype, 37, out);
      MatmulProblem p{.a = cases.aligned(dtype, 37, in),
                      .b = {},
                      .transpose_b = transposed,
                      .out = y.out,
                      .codes = cases.operand(spec, kRows, count * rows, cols,
                                             count > 1 ? RowGroups::equal(count, rows) : RowGroups{})};
      if (count > 1) p.groups = cases.groups({20, 20, 37}, 37, false);
      SCOPED_TRACE(spec);
      expect_within(cases, p, y, "pipelined");
      if (HasFatalFailure()) return;
    }
}

/// The first rows of a batch alone give the bits that they have in it, in wide tiles and in others.
TEST(Pipelined, RowsDoNotDependOnTheirBatch) {
  ProductCases cases(55);
  constexpr int64_t rows = 136, cols = 1032, length = 264;
  MatmulProblem all = product(cases, kForms[0], DType::bf16, {rows, cols, length});
  const auto run = [&](int64_t some) {
    MatmulProblem p = all;
    p.a.rows = some, p.out = cases.output(DType::f32, some, cols).out;
    cases.run(p, "pipelined");
    return p.out;
  };
  const MutableMatrix whole = run(rows);
  for (const int64_t few : {1, 65}) {
    SCOPED_TRACE(text(few, " rows"));
    expect_first_rows(run(few), whole);
    if (HasFatalFailure()) return;
  }
}

/// Some steps of a contraction and a part of one, of whole tiles, so that every lane has outputs: more than there are
/// blocks.
TEST(Pipelined, WholeTilesAreWithinTheirBound) {
  ProductCases cases(56);
  for (const Form& form : kForms) {
    cases.clear();
    MatmulProblem p = product(cases, form, DType::bf16, {128, 640, 168});
    const Output o = cases.output(DType::bf16, 128, 640);
    p.out = o.out;
    expect_within(cases, p, o, "pipelined");
    if (HasFatalFailure()) return;
  }
}

TEST(Pipelined, TakesFewInstructions) {
  if (on_gpu()) GTEST_SKIP() << "a GPU counts none";
  for (const Form& form : kForms)
    for (const int64_t cols : {128, 1024}) {
      const auto steps_of = [&](int64_t length) {
        ProductCases cases(57);
        MatmulProblem p = product(cases, form, DType::bf16, {128, cols, length});
        p.out = {const_cast<void*>(cases.aligned(DType::bf16, 128, cols).data), DType::bf16, 128, cols, cols};
        cases.run(p, "pipelined");
        return static_cast<double>(cases.twins().device.steps());
      };
      const double few = (steps_of(256) - steps_of(128)) / (128 * static_cast<double>(cols) * 128 / (16 * 8 * 16)) / 32;
      std::cout << (form.a ? "a across, " : "") << (form.b ? "" : "b across, ") << cols << " columns: " << few
                << " instructions of PTX a multiplication of a warp\n";
      EXPECT_LT(few, 3);
    }
}

TEST(Pipelined, RefusesWhatCopiesOf16BytesDoNotHave) {
  ProductCases cases(58);
  const Context& context = cases.twins().device;
  MatmulProblem p = product(cases, kForms[0], DType::bf16, {24, 16, 40});
  p.out = cases.output(DType::bf16, 24, 16).out;
  const auto choice = [&] { return explain_choice(p, context); };
  EXPECT_NE(choice().find("\npipelined: runs\n"), std::string::npos) << choice();
  const MatmulProblem good = p;
  const char* const copied = "\npipelined: copies 16 bytes at a time";
  p.a.row_stride = 41;
  EXPECT_NE(choice().find(copied), std::string::npos) << choice();
  p = good, p.b.data = static_cast<const std::byte*>(p.b.data) + 2;
  EXPECT_NE(choice().find(copied), std::string::npos) << choice();
  p = good, p.a.cols = p.b.cols = 36;
  EXPECT_NE(choice().find(copied), std::string::npos) << choice();
  p = good, p.b.dtype = DType::f16;
  EXPECT_NE(choice().find("\npipelined: multiplies operands in one dtype"), std::string::npos) << choice();
  p = good, p.transpose_a = true, p.a.rows = 40, p.a.cols = 24, p.a.row_stride = 24;
  EXPECT_NE(choice().find("\npipelined: takes no transposed a with a transposed b"), std::string::npos) << choice();
}

}  // namespace
}  // namespace quire::testing
