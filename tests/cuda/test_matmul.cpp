// Products of plain matrices on the CUDA device: the reference has the bits of the CPU's, and the library that is lent
// gets plain matrices.
#include <cstdlib>
#include <functional>

#include "cuda/plain_case.h"
#include "quire/device/library.h"

namespace quire::testing {
namespace {

/// The host's products of plain matrices are the reference's, also those of groups, which it cuts and dispatches again.
[[maybe_unused]] const int kForced = setenv("QUIRE_KERNEL", "cpu:matmul:reference", 0);

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
      const DType dtype = kDTypes[turn % 3];
      const GroupedForm form{dtype, DType::bf16, DType::f32, DType::f32, turn >= 3, turn % 2 == 1};
      each_grouped(cases, g, form, [&](const MatmulProblem& p, const Output& o) {
        expect_reference(cases, p, o);
        if (p.transpose_a || !p.bs.empty()) return;
        const int64_t count = p.groups.count, rows = p.b.rows / count;
        for (const char* spec : {"fp8_tensor", "mxfp8:swizzled", "nvfp4:16x16", "mxfp4:interleaved"}) {
          MatmulProblem codes = p;
          codes.b = {}, codes.b.dtype = dtype;
          codes.codes = cases.operand(spec, kRows, count * rows, p.b.cols, RowGroups::equal(count, rows));
          expect_reference(cases, codes, o);
        }
      });
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

/// What was lent problems, with the bits of the CPU's reference.
std::vector<std::string>* lent = nullptr;
std::function<void()> before_lent;
void lent_matmul(const MatmulProblem& p, const Context&) {
  lent->push_back(to_string(p));
  before_lent();  // which reads what kernels have written
  reference::matmul(p);
}

/// A library that is lent for as long as this lives.
class Lent {
 public:
  explicit Lent(CudaDevice& device) : before_(set_matmul(lent_matmul)) {
    lent = &problems;
    before_lent = [&device] { device.synchronize(); };
  }
  ~Lent() { set_matmul(before_); }
  Lent(const Lent&) = delete;
  Lent& operator=(const Lent&) = delete;

  std::vector<std::string> problems;

 private:
  Matmul* before_;
};

TEST(Matmuls, OfOneTensorGoToTheLibraryThatIsLentAndGroupsDoNot) {
  ProductCases cases(8);
  const Output y = cases.output(DType::bf16, 20, 6);
  MatmulProblem p{.a = cases.matrix(DType::bf16, 20, 3), .b = cases.matrix(DType::bf16, 3, 6), .out = y.out};
  const Context& context = cases.twins().device;
  EXPECT_EQ(explain_choice(p, context),
            "skinny: takes weights in codes\nfew_rows: takes at most 16 rows of a, which can have 20\n"
            "library: no library is lent to multiply plain matrices (set_matmul)\n"
            "pipelined: copies 16 bytes at a time, but rows of a or b do not begin at multiples of 16 bytes, or do not "
            "have a multiple of 8 columns\ntiles: runs\n"
            "tiles32: not asked, tiles comes first\nreference: not asked, tiles comes first\n");
  const Lent library(cases.twins().device);
  cases.expect_bits(p, y, "library", [&] { reference::matmul(p); });
  EXPECT_EQ(library.problems, std::vector<std::string>{to_string(p)});
  MatmulProblem grouped = p;
  grouped.groups = cases.groups({1, 20}, 20);
  grouped.b = cases.matrix(DType::bf16, 6, 6);
  EXPECT_EQ(explain_choice(grouped, context),
            "skinny: takes weights in codes\nfew_rows: takes at most 16 rows of a, which can have 20\n"
            "library: takes one product, but the problem has groups\n"
            "pipelined: copies 16 bytes at a time, but rows of a or b do not begin at multiples of 16 bytes, or do not "
            "have a multiple of 8 columns\ntiles: runs\n"
            "tiles32: not asked, tiles comes first\nreference: not asked, tiles comes first\n");
  grouped.out.dtype = DType::f32, grouped.a.dtype = DType::f32;
  EXPECT_NE(explain_choice(grouped, context).find("tiles: multiplies in float16 or bfloat16"), std::string::npos);
  EXPECT_NE(explain_choice(grouped, context).find("tiles32: runs"), std::string::npos);
}

/// Whatever is in lists or in codes: the library sees plain matrices.
TEST(Matmuls, OfOneTensorInCodesAreDecodedForTheLibrary) {
  ProductCases cases(9);
  for (const char* spec : {"fp8_tensor", "mxfp8:swizzled", "nvfp4:16x16", "mxfp4:interleaved"})
    for (const DType dtype : kDTypes)
      for (const bool transposed : {false, true}) {
        cases.clear();
        const Output y = cases.output(dtype, 20, kOutputs);
        MatmulProblem p{.a = cases.matrix(dtype, 20, kInputs), .b = {}, .transpose_b = transposed, .out = y.out};
        p.codes = cases.operand(spec, kRows, transposed ? kOutputs : kInputs, transposed ? kInputs : kOutputs);
        const std::vector<Vector> biases{cases.vector(DType::f16, kOutputs)};
        p.biases = biases;
        std::string expected;
        const auto by_cpu = [&] {
          each_matmul(p, [&](const MatmulProblem& q) { expected = to_string(q), reference::matmul(q); });
        };
        const Lent library(cases.twins().device);
        cases.expect_bits(p, y, "library", by_cpu);
        EXPECT_EQ(library.problems, std::vector<std::string>{expected});
        const std::vector<Side> sides{
            {const_cast<void*>(p.codes->data), const_cast<void*>(p.codes->scale), const_cast<float*>(p.codes->amax)}};
        const std::vector<MutableMatrix> outs{y.out};
        MatmulProblem lists = p;
        lists.codes->data = lists.codes->scale = nullptr, lists.codes->amax = nullptr, lists.codes->each = sides;
        lists.outs = outs, lists.out.data = nullptr;
        cases.expect_bits(lists, y, "library", by_cpu);
      }
}

}  // namespace
}  // namespace quire::testing
