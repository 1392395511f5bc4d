// Norms, activations, their gradients and column sums: what a GPU computes has the bits of the CPU.
#include <gtest/gtest.h>

#include "cuda/many_cases.h"
#include "cuda/pointwise_case.h"

namespace quire::testing {
namespace {

struct Size {
  int64_t rows, cols;
};
/// About the 16 sums of a row and the chunks of 128 rows of a column.
constexpr std::array kSizes{Size{1, 1},   Size{3, 15},  Size{5, 16},  Size{7, 33},  Size{16, 64}, Size{33, 48},
                            Size{130, 8}, Size{128, 3}, Size{300, 5}, Size{4, 257}, Size{0, 5},   Size{3, 0}};

/// How much is run: each size with each kind of numbers, with aligned matrices and with others, `rounds` times; and of
/// these cases one of `every`.
struct Amount {
  uint64_t rounds = 1, every = 1;
};

/// Calls body(size) with memory for a case. Each row of the device must have run.
template <class Body>
void for_each_case(PointwiseComparison& cases, Amount amount, std::initializer_list<const char*> rows,
                   const Body& body) {
  if (many_cases()) amount.rounds *= 10;
  for (uint64_t round = 0; round < 2 * amount.rounds; ++round)
    for (const Size& size : kSizes)
      for (uint64_t kind = 0; kind < 8 && !::testing::Test::HasFailure(); ++kind) {
        if (cases.turn++ % amount.every != 0) continue;
        cases.begin(kind, round % 2 == 1);
        SCOPED_TRACE(
            text("[", size.rows, ", ", cases.columns(size.cols), "] of numbers of kind ", kind, ", round ", round));
        body(Size{size.rows, cases.columns(size.cols)});
      }
  ::testing::Test::RecordProperty("results", static_cast<int>(cases.compared));
  for (const char* row : rows) EXPECT_GT(cases.ran[row], 0u) << row;
}

TEST(Pointwise, ColumnSumsOfEveryGroupHaveTheBitsOfTheCpu) {
  PointwiseComparison cases(1);
  for_each_case(cases, {.rounds = 2}, {"vector", "reference"}, [&](const Size& size) {
    ColumnSumProblem p{.x = cases.matrix(cases.dtype(), size.rows, size.cols), .out_dtype = cases.any_dtype()};
    p.groups = cases.groups(size.rows);
    p.out = cases.result("out", p.out_dtype, p.groups.count * size.cols);
    cases.compare(p);
  });
}

TEST(Pointwise, NormsAndTheirCodesHaveTheBitsOfTheCpu) {
  PointwiseComparison cases(2);
  for (const NormKind kind : {NormKind::layer, NormKind::rms})
    for_each_case(cases, {}, {"vector", "reference"}, [&](const Size& size) {
      const DType parameters = cases.any_dtype();
      NormProblem p{.kind = kind,
                    .x = cases.matrix(cases.dtype(), size.rows, size.cols),
                    .gamma = cases.vector(parameters, size.cols),
                    .beta = cases.coin() ? cases.vector(parameters, size.cols) : Vector{},
                    .zero_centered = cases.coin(),
                    .eps = cases.die(4) == 0 ? 0.0f : 1e-5f,
                    .out = cases.destination(size.rows, size.cols)};
      if (cases.coin()) p.mean = static_cast<float*>(cases.result("mean", DType::f32, size.rows));
      if (cases.coin() || cases.written.empty())
        p.rstd = static_cast<float*>(cases.result("rstd", DType::f32, size.rows));
      cases.compare(p);
    });
}

TEST(Pointwise, GradientsOfNormsHaveTheBitsOfTheCpu) {
  PointwiseComparison cases(3);
  for (const NormKind kind : {NormKind::layer, NormKind::rms})
    for_each_case(cases, {}, {"vector", "reference"}, [&](const Size& size) {
      NormGradProblem p{.kind = kind,
                        .dy = cases.matrix(cases.dtype(), size.rows, size.cols),
                        .x = cases.matrix(cases.dtype(), size.rows, size.cols),
                        .gamma = cases.vector(cases.any_dtype(), size.cols),
                        .zero_centered = cases.coin(),
                        .mean = kind == NormKind::layer ? cases.floats(size.rows) : nullptr,
                        .rstd = cases.floats(size.rows),
                        .dx = {}};
      const uint64_t absent = cases.die(5);  // at most one
      if (absent != 0) p.dx = cases.result_matrix("dx", cases.dtype(), size.rows, size.cols);
      if (absent != 1) p.dgamma = cases.result("dgamma", p.gamma.dtype, size.cols);
      if (absent != 2) p.dbeta = cases.result("dbeta", p.gamma.dtype, size.cols);
      cases.compare(p);
    });
}

/// Rows that need more shared memory than a block has without asking, and more than it has.
TEST(Pointwise, LongRowsHaveTheBitsOfTheCpu) {
  PointwiseComparison cases(10);
  for (const auto& [cols, row] :
       {std::pair<int64_t, const char*>{5000, "vector"}, {8000, "vector"}, {9000, "reference"}}) {
    cases.begin(0, true);
    NormProblem p;
    p.x = cases.matrix(DType::f32, 3, cols), p.gamma = cases.vector(DType::bf16, cols);
    p.out.y = cases.result_matrix("y", DType::f32, 3, cols);
    p.rstd = static_cast<float*>(cases.result("rstd", DType::f32, 3));
    cases.ran.clear();
    cases.compare(p);
    EXPECT_EQ(cases.ran[row], 1u) << cols;
  }
}

Activation activation_of(PointwiseComparison& cases, size_t kind) {
  Activation a{.kind = static_cast<uint8_t>(kind), .alpha = kActivations[kind].alpha};
  if (a.row().clamped && cases.coin()) a.limit = 0.75f, a.alpha = 2, a.offset = 0.5f;
  return a;
}

TEST(Pointwise, ActivationsAndTheirCodesHaveTheBitsOfTheCpu) {
  PointwiseComparison cases(4);
  for (size_t kind = 0; kind < kActivations.size(); ++kind)
    for_each_case(cases, {.every = 5}, {"vector", "reference"}, [&](const Size& size) {
      ActivationProblem p;
      p.activation = activation_of(cases, kind);
      p.groups = cases.groups(size.rows);
      p.x = cases.matrix(cases.dtype(), size.rows, size.cols * p.activation.inputs());
      p.out = cases.destination(size.rows, size.cols, p.groups, p.in_groups() ? &p.room : nullptr);
      cases.compare(p);
    });
}

TEST(Pointwise, AnActivationMayTakeThePlaceOfItsArgument) {
  PointwiseComparison cases(5);
  for (size_t i = 0; i < 2 * kActivations.size(); ++i) {
    const size_t kind = i / 2;
    cases.begin(kind % 8, i % 2 == 1);
    ActivationProblem p;
    p.activation = activation_of(cases, kind);
    const int64_t rows = 37, cols = cases.columns(21), width = cols * p.activation.inputs();
    const DType dtype = cases.dtype();
    auto* const x = static_cast<std::byte*>(cases.result("x", dtype, rows * width));
    for (int64_t at = 0; at < rows * width; ++at) store_element(x, dtype, at, draw(cases, kind % 8));
    p.x = {x, dtype, rows, width, width}, p.out.y = {x, dtype, rows, cols, width};
    cases.compare(p);
  }
}

TEST(Pointwise, GradientsOfActivationsHaveTheBitsOfTheCpu) {
  PointwiseComparison cases(6);
  for (size_t kind = 0; kind < kActivations.size(); ++kind)
    for_each_case(cases, {.every = 5}, {"vector", "reference"}, [&](const Size& size) {
      const Activation a = activation_of(cases, kind);
      const int64_t width = size.cols * a.inputs();
      cases.compare(ActivationGradProblem{.activation = a,
                                          .dy = cases.matrix(cases.dtype(), size.rows, size.cols),
                                          .x = cases.matrix(cases.dtype(), size.rows, width),
                                          .dx = cases.result_matrix("dx", cases.dtype(), size.rows, width),
                                          .groups = cases.groups(size.rows)});
    });
}

/// An activation of groups to rowwise codes.
ActivationProblem grouped_activation(PointwiseComparison& cases, const std::vector<int64_t>& ends, int64_t rows) {
  cases.begin(0, false);
  ActivationProblem p;
  p.x = cases.matrix(DType::f32, rows, 32);
  p.groups = {.count = std::ssize(ends),
              .rows = rows,
              .ends = {cases.twins.array(ends), std::ssize(ends), true},
              .what = "activation"};
  p.out = {.y = cases.result_matrix("y", DType::bf16, rows, 32), .spec = QuantSpec::parse("mxfp8")};
  p.room.rowwise = grouped_counts(p.out.spec, GroupSizes<int64_t>{rows, 32, p.groups.count}, Direction::rowwise);
  p.out.rowwise = {cases.twins.room<std::byte>(p.room.rowwise[0]), cases.twins.room<std::byte>(p.room.rowwise[1]),
                   nullptr};
  return p;
}

TEST(Pointwise, EndsThatBreakTheirRuleAreReportedAndNothingBeyondIsTouched) {
  PointwiseComparison cases(7);
  for (const auto& ends : {std::vector<int64_t>{3, 2, 9}, {-1, 5, 9}, {3, 8, 10}, {1, INT64_MAX, INT64_MAX}}) {
    const ActivationProblem a = grouped_activation(cases, ends, 9);
    cases.twins.expect_same_error(a);
    ColumnSumProblem p{.x = a.x, .out = cases.result("out", DType::f32, 3 * 32), .groups = a.groups};
    p.groups.what = "column_sum";
    cases.twins.expect_same_error(p);
  }
}

TEST(Pointwise, BuffersThatAreTooSmallForGroupsAreReported) {
  PointwiseComparison cases(8);
  for (const size_t buffer : {0, 1}) {
    ActivationProblem p = grouped_activation(cases, {3, 3, 9}, 9);
    p.room.rowwise[buffer] = 8;
    cases.twins.expect_same_error(p);
  }
}

TEST(Pointwise, GivenScalesAndAmaxesThatBreakTheirRuleAreReported) {
  PointwiseComparison cases(9);
  for (const auto& [text, number] : {std::pair{"fp8_tensor:given", 0.0f},
                                     {"fp8_tensor:given", -1.0f},
                                     {"nvfp4:given", NAN},
                                     {"nvfp4:given", INFINITY},
                                     {"nvfp4", NAN},
                                     {"nvfp4", -1.0f},
                                     {"fp8_row", -0.5f}})
    for (const bool of_norm : {true, false}) {
      SCOPED_TRACE(text);
      cases.begin(0, false);
      const QuantSpec spec = QuantSpec::parse(text);
      std::vector<float> numbers(3, 2.0f);
      numbers[spec.given || spec.row().scope != Scope::row ? 0 : 2] = number;
      Destination to{.y = cases.result_matrix("y", DType::bf16, 3, 32), .spec = spec};
      const auto count = counts(buffers<int64_t>(spec, {3, 32}, Direction::rowwise));
      to.rowwise = {cases.twins.room<std::byte>(count[0]), cases.twins.room<float>(count[1]),
                    cases.twins.room<float>(count[2])};
      (spec.given ? to.scale : to.amax.rowwise) = cases.twins.array(numbers);
      const Matrix x = cases.matrix(DType::f32, 3, 32);
      NormProblem norm;
      norm.x = x, norm.gamma = cases.vector(DType::f32, 32), norm.out = to;
      ActivationProblem activation;
      activation.x = x, activation.out = to;
      of_norm ? cases.twins.expect_same_error(norm) : cases.twins.expect_same_error(activation);
    }
}

}  // namespace
}  // namespace quire::testing
