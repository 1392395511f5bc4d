// Products of plain matrices on the CUDA device: the bits of the CPU's reference, or the library that is lent.
#include "cuda/product_case.h"
#include "quire/device/library.h"

namespace quire::testing {
namespace {

/// The CPU's reference: no library is lent here.
void expect_reference(ProductCases& cases, const MatmulProblem& p, const Output& o) {
  cases.expect_bits(p, o, "reference", [&] { dispatch(p, host()); });
}

TEST(Matmuls, HaveTheBitsOfTheCpusReference) {
  ProductCases cases(5);
  int64_t turn = 0;
  for (const Shape3& s : kShapes)
    for (const bool ta : {false, true})
      for (const bool tb : {false, true}) {
        cases.clear();
        const auto dtype = [&] { return kDTypes[cases.die(3)]; };
        const uint64_t kind = cases.die(3);
        const Matrix a = ta ? cases.matrix(dtype(), s.k, s.m, kind) : cases.matrix(dtype(), s.m, s.k, kind);
        const Matrix b = tb ? cases.matrix(dtype(), s.n, s.k, kind) : cases.matrix(dtype(), s.k, s.n, kind);
        const Output o = cases.output(kDTypes[static_cast<size_t>(++turn) % 3], s.m, s.n);
        const Vector bias = turn % 2 ? cases.vector(dtype(), s.n) : Vector{};
        expect_reference(cases, {.a = a, .b = b, .transpose_a = ta, .transpose_b = tb, .bias = bias, .out = o.out}, o);
      }
}

TEST(Matmuls, OfGroupsHaveTheBitsOfTheCpusReference) {
  ProductCases cases(6);
  for (const Grouping& g : groupings())
    for (size_t turn = 0; turn < 6; ++turn) {
      cases.clear();
      SCOPED_TRACE(text(g.what, ", turn ", turn));
      const auto count = std::ssize(g.ends);
      const DType dtype = kDTypes[turn % 3];
      const bool transposed = turn >= 3;
      MatmulProblem p{.a = cases.matrix(DType::bf16, kTokens, kInputs),
                      .b = transposed ? cases.matrix(DType::f32, count * kOutputs, kInputs)
                                      : cases.matrix(DType::f32, count * kInputs, kOutputs),
                      .transpose_b = transposed,
                      .out = {},
                      .groups = cases.groups(g.ends, kTokens, g.wide)};
      const Output y = cases.output(dtype, kTokens, kOutputs);
      p.out = y.out;
      if (turn % 2) p.bias = cases.vector(DType::f16, count * kOutputs);
      expect_reference(cases, p, y);
      // The same of a list of matrices, and of codes.
      std::vector<Matrix> list;
      std::vector<Vector> biases;
      for (int64_t e = 0; e < count; ++e) {
        list.push_back(transposed ? cases.matrix(DType::f32, kOutputs, kInputs)
                                  : cases.matrix(DType::f32, kInputs, kOutputs));
        biases.push_back(cases.vector(DType::bf16, kOutputs));
      }
      MatmulProblem lists = p;
      lists.bs = list, lists.bias = {}, lists.biases = biases;
      expect_reference(cases, lists, y);
      for (const char* spec : {"fp8_tensor", "mxfp8:swizzled", "nvfp4:16x16", "mxfp4:interleaved"}) {
        MatmulProblem codes = p;
        const int64_t rows = transposed ? kOutputs : kInputs, cols = transposed ? kInputs : kOutputs;
        codes.b = {}, codes.b.dtype = dtype;
        codes.codes = cases.operand(spec, kRows, count * rows, cols, RowGroups::equal(count, rows));
        expect_reference(cases, codes, y);
      }
      // The gradient of weights.
      const Output dw = cases.output(dtype, count * kOutputs, kInputs, turn % 2 ? count : 0);
      expect_reference(cases,
                       {.a = cases.matrix(DType::bf16, kTokens, kOutputs),
                        .b = cases.matrix(DType::bf16, kTokens, kInputs),
                        .transpose_a = true,
                        .out = dw.out,
                        .groups = p.groups,
                        .outs = dw.each},
                       dw);
    }
}

TEST(Matmuls, OfGroupsWithBrokenEndsRaiseTheErrorOfTheCpu) {
  ProductCases cases(7);
  for (const std::vector<int64_t>& ends : {std::vector<int64_t>{5, 4, 37}, {0, 0, 38}}) {
    const Output y = cases.output(DType::f32, kTokens, kOutputs);
    cases.twins().expect_same_error(MatmulProblem{.a = cases.matrix(DType::bf16, kTokens, kInputs),
                                                  .b = cases.matrix(DType::f32, 3 * kInputs, kOutputs),
                                                  .out = y.out,
                                                  .groups = cases.groups(ends, kTokens)});
  }
}

/// Puts its own mark into the output.
void lent_matmul(const MatmulProblem& p, const Context&) { static_cast<float*>(p.out.data)[0] = 12345; }

TEST(Matmuls, OfOneTensorGoToTheLibraryThatIsLentAndGroupsDoNot) {
  ProductCases cases(8);
  const Output y = cases.output(DType::f32, 4, 6);
  MatmulProblem p{.a = cases.matrix(DType::f32, 4, 3), .b = cases.matrix(DType::f32, 3, 6), .out = y.out};
  const Context& context = cases.twins().device;
  EXPECT_NE(explain_choice(p, context).find("library: no library is lent"), std::string::npos);
  Matmul* const before = set_matmul(lent_matmul);
  dispatch(p, context);
  EXPECT_EQ(static_cast<float*>(y.out.data)[0], 12345);
  MatmulProblem grouped = p;
  grouped.groups = cases.groups({1, 4}, 4);
  grouped.b = cases.matrix(DType::f32, 6, 6);
  EXPECT_EQ(explain_choice(grouped, context),
            "library: takes one tensor, but the problem has groups\nreference: runs\n");
  set_matmul(before);
}

}  // namespace
}  // namespace quire::testing
