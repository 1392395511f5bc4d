// LayerNorm and RMSNorm: against double within the bound of numerics.md 11.2, kernels against the reference bit for
// bit, and quantized results against quantizing the result.
#include <cmath>
#include <cstring>
#include <numeric>

#include "inputs.h"
#include "produced.h"
#include "quire/base/parallel.h"
#include "quire/operations/operations.h"
#include "specs.h"

namespace quire::testing {
namespace {

constexpr InputShape kShapes[] = {{0, 5},  {3, 0},   {1, 1},        {2, 15}, {5, 16},       {7, 33, 3, 1},
                                  {4, 97}, {130, 8}, {129, 100, 5}, {2, 3},  {300, 260, 1}, {33, 1}};
constexpr NormKind kKinds[] = {NormKind::layer, NormKind::rms};

/// A norm and its gradient with memory of their own.
struct Case {
  NormKind kind;
  Input x, dy, gamma, beta;
  DType parameters, out;
  bool zero_centered, has_beta;

  Case(NormKind k, InputShape shape, std::array<DType, 3> dtypes, Kind values, uint64_t seed)
      : kind(k),
        x(shape, dtypes[0], values, seed),
        dy({shape.rows, shape.cols}, dtypes[2], values, seed + 1),
        gamma({1, shape.cols}, dtypes[1], Kind::normal, seed + 2),
        beta({1, shape.cols}, dtypes[1], Kind::normal, seed + 3),
        parameters(dtypes[1]),
        out(dtypes[2]),
        zero_centered(seed % 2 == 0),
        has_beta(seed % 3 != 0) {}

  Vector vector(const Input& of) const { return {Matrix(of).data, parameters}; }
  NormProblem problem(const Destination& to, float* mean, float* rstd) const {
    return {.kind = kind,
            .x = x,
            .gamma = vector(gamma),
            .beta = has_beta ? vector(beta) : Vector{},
            .zero_centered = zero_centered,
            .eps = 1e-5f,
            .out = to,
            .mean = mean,
            .rstd = rstd};
  }
  int64_t rows() const { return Matrix(x).rows; }
  int64_t cols() const { return Matrix(x).cols; }
  double gain(int64_t j) const {
    const double g = static_cast<double>(load_element(Matrix(gamma).data, parameters, j));
    return zero_centered ? 1 + g : g;
  }
};

struct Normed {
  Produced out;
  Guarded mean, rstd;
};

Normed normed(const Runner& runner, const Case& c, const Wanted& wanted = {}) {
  Normed n{Produced{Guarded(), {}}, Guarded(c.rows() * 4), Guarded(c.rows() * 4)};
  n.out = produced(c.rows(), c.cols(), c.out, wanted, [&](const Destination& to) {
    runner.run.norm(c.problem(to, n.mean.as<float>(), n.rstd.as<float>()));
  });
  EXPECT_TRUE(n.mean.intact() && n.rstd.intact());
  return n;
}

struct Gradients {
  Guarded dx, dgamma, dbeta;
};

Gradients gradients(const Runner& runner, const Case& c, const Normed& n) {
  const DType dx = Matrix(c.x).dtype;
  Gradients g{Guarded(c.rows() * c.cols() * size_of(dx)), Guarded(c.cols() * size_of(c.parameters)),
              Guarded(c.cols() * size_of(c.parameters))};
  runner.run.norm_grad({.kind = c.kind,
                        .dy = c.dy,
                        .x = c.x,
                        .gamma = c.vector(c.gamma),
                        .zero_centered = c.zero_centered,
                        .mean = n.mean.as<float>(),
                        .rstd = n.rstd.as<float>(),
                        .dx = {g.dx.data(), dx, c.rows(), c.cols(), c.cols()},
                        .dgamma = g.dgamma.data(),
                        .dbeta = g.dbeta.data()});
  EXPECT_TRUE(g.dx.intact() && g.dgamma.intact() && g.dbeta.intact());
  return g;
}

double element(const Matrix& m, int64_t i, int64_t j) {
  return static_cast<double>(load_element(m.data, m.dtype, i * m.row_stride + j));
}

/// Calls body(case) for all shapes, kinds and dtypes in turn.
template <class Body>
void for_each_case(std::initializer_list<Kind> kinds, const Body& body) {
  uint64_t turn = 0;
  for (const InputShape& shape : kShapes)
    for (const NormKind kind : kKinds)
      for (const DType in : kFloatTypes)
        for (const Kind values : kinds) {
          ++turn;
          const Case c(kind, shape, {in, kFloatTypes[turn % 3], kFloatTypes[turn / 3 % 3]}, values, turn);
          SCOPED_TRACE(text(name(kind), " of ", name(in), " [", shape.rows, ", ", shape.cols, "] ",
                            kKindNames[static_cast<size_t>(values)], " parameters ", name(c.parameters), " to ",
                            name(c.out), c.zero_centered ? " zero-centered" : "", c.has_beta ? " with beta" : ""));
          body(c);
          if (::testing::Test::HasFatalFailure()) return;
        }
}

class Norm : public EveryRunner {};

/// Row i in double from the given mean and rstd's definition, with the magnitude that the bound multiplies.
void expect_row(const Case& c, const Normed& n, int64_t i) {
  const double k = std::max(1.0, static_cast<double>(c.cols()));
  double mean = 0, magnitude = 0, squares = 0;
  for (int64_t j = 0; j < c.cols(); ++j) {
    mean += element(c.x, i, j) / k;
    magnitude += std::fabs(element(c.x, i, j)) / k;
  }
  if (c.kind == NormKind::rms) mean = 0;
  for (int64_t j = 0; j < c.cols(); ++j) squares += (element(c.x, i, j) - mean) * (element(c.x, i, j) - mean);
  const double rstd = 1 / std::sqrt(squares / k + 1e-5), u = 0x1p-24;
  ASSERT_NEAR(mean, static_cast<double>(n.mean.as<float>()[i]), (k / 16 + 6) * u * magnitude);
  ASSERT_NEAR(rstd, static_cast<double>(n.rstd.as<float>()[i]), (k / 16 + 8) * u * rstd);
  for (int64_t j = 0; j < c.cols(); ++j) {
    const double x = element(c.x, i, j), beta = c.has_beta ? element(c.beta, 0, j) : 0;
    const double y = (x - mean) * rstd * c.gain(j) + beta;
    const double bound =
        (k / 8 + 16) * u * (std::fabs(c.gain(j)) * rstd * (std::fabs(x) + magnitude) + std::fabs(beta));
    ASSERT_NEAR(y, static_cast<double>(load_element(n.out.y.data(), c.out, i * c.cols() + j)),
                bound + unit(c.out) * (std::fabs(y) + bound) + tiny(c.out))
        << "row " << i << " column " << j;
  }
}

TEST_P(Norm, IsWithinItsBoundOfDouble) {
  for_each_case({Kind::normal, Kind::ties}, [](const Case& c) {
    const Normed n = normed(GetParam(), c);
    for (int64_t i = 0; i < c.rows(); ++i) expect_row(c, n, i);
  });
}

/// The sums of one row's gradient in double, and of their magnitudes.
struct RowSums {
  double c1 = 0, c2 = 0, m1 = 0, m2 = 0;
};

RowSums row_sums(const Case& c, int64_t i, double mean, double rstd) {
  RowSums s;
  const auto k = static_cast<double>(c.cols());
  for (int64_t j = 0; j < c.cols(); ++j) {
    const double g = element(c.dy, i, j) * c.gain(j) / k, x = (element(c.x, i, j) - mean) * rstd;
    if (c.kind == NormKind::layer) s.c1 += g, s.m1 += std::fabs(g);
    s.c2 += g * x;
    s.m2 += std::fabs(g * x);
  }
  return s;
}

TEST_P(Norm, GradientsAreWithinTheirBoundsOfDouble) {
  for_each_case({Kind::normal}, [](const Case& c) {
    const Normed n = normed(reference_runner(), c);
    const Gradients g = gradients(GetParam(), c, n);
    const double k = static_cast<double>(c.cols()), m = static_cast<double>(c.rows()), u = 0x1p-24;
    const size_t cols = static_cast<size_t>(c.cols());
    std::vector<double> dgamma(cols), dbeta(cols), gamma_terms(cols), beta_terms(cols);
    const DType dtype = Matrix(c.x).dtype;
    for (int64_t i = 0; i < c.rows(); ++i) {
      const double mean = static_cast<double>(n.mean.as<float>()[i]), rstd = static_cast<double>(n.rstd.as<float>()[i]);
      const RowSums s = row_sums(c, i, mean, rstd);
      for (int64_t j = 0; j < c.cols(); ++j) {
        const double dy = element(c.dy, i, j), x = (element(c.x, i, j) - mean) * rstd, w = dy * c.gain(j);
        const auto at = static_cast<size_t>(j);
        dgamma[at] += dy * x, gamma_terms[at] += std::fabs(dy * x);
        dbeta[at] += dy, beta_terms[at] += std::fabs(dy);
        const double dx = (w - (s.c1 + x * s.c2)) * rstd;
        const double bound = (k / 16 + 16) * u * rstd * (std::fabs(w) + s.m1 + std::fabs(x) * s.m2);
        ASSERT_NEAR(dx, static_cast<double>(load_element(g.dx.data(), dtype, i * c.cols() + j)),
                    bound + unit(dtype) * (std::fabs(dx) + bound) + tiny(dtype));
      }
    }
    for (size_t j = 0; j < cols; ++j) {
      const auto expect = [&](double sum, double terms, const Guarded& got) {
        const double bound = (m + 4) * u * terms;
        ASSERT_NEAR(sum, static_cast<double>(load_element(got.data(), c.parameters, static_cast<int64_t>(j))),
                    bound + unit(c.parameters) * (std::fabs(sum) + bound) + tiny(c.parameters));
      };
      expect(dgamma[j], gamma_terms[j], g.dgamma);
      expect(dbeta[j], beta_terms[j], g.dbeta);
    }
  });
}

QUIRE_FOR_EVERY_RUNNER(Norm);

void expect_same(const Case& c, const Normed& a, const Normed& b) {
  ASSERT_EQ(value_difference(a.out.y, b.out.y, c.out), "");
  ASSERT_EQ(value_difference(a.mean, b.mean, DType::f32), "");
  ASSERT_EQ(value_difference(a.rstd, b.rstd, DType::f32), "");
}

void expect_same(const Case& c, const Gradients& a, const Gradients& b) {
  ASSERT_EQ(value_difference(a.dx, b.dx, Matrix(c.x).dtype), "");
  ASSERT_EQ(value_difference(a.dgamma, b.dgamma, c.parameters), "");
  ASSERT_EQ(value_difference(a.dbeta, b.dbeta, c.parameters), "");
}

TEST(NormParity, EveryInputGivesTheBitsOfTheReference) {
  for_each_case({Kind::normal, Kind::wide, Kind::special, Kind::huge, Kind::zeros}, [](const Case& c) {
    const Normed expected = normed(reference_runner(), c);
    expect_same(c, expected, normed(active_runner(), c));
    expect_same(c, gradients(reference_runner(), c, expected), gradients(active_runner(), c, expected));
  });
}

TEST(NormParity, ANaNAmongParametersGivesTheBitsOfTheReference) {
  // Rounded to bfloat16 as a number, this NaN would become -0.
  constexpr uint32_t nan = 0x7FFFFFFFu;
  for (const NormKind kind : kKinds)
    for (const uint64_t seed : {6, 7}) {  // without beta, and with it
      const Case c(kind, {5, 70}, {DType::bf16, DType::f32, DType::bf16}, Kind::normal, seed);
      const Matrix parameters = c.has_beta ? c.beta : c.gamma;
      std::memcpy(static_cast<float*>(const_cast<void*>(parameters.data)) + 13, &nan, sizeof nan);
      expect_same(c, normed(reference_runner(), c), normed(active_runner(), c));
    }
}

void run_backwards(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body) {
  const int64_t step = std::max<int64_t>(grain, 1);
  for (int64_t begin = (count - 1) / step * step; begin >= 0; begin -= step) body(begin, std::min(begin + step, count));
}

TEST(NormParity, DoesNotDependOnHowWorkIsCut) {
  const Wanted wanted{.spec = QuantSpec::parse("fp8_tensor")};
  const Case c(NormKind::layer, {700, 90}, {DType::bf16, DType::f32, DType::f32}, Kind::normal, 5);
  const Normed whole = normed(active_runner(), c, wanted);
  const Gradients whole_gradients = gradients(active_runner(), c, whole);
  const Executor before = set_executor(run_backwards);
  const Normed cut = normed(active_runner(), c, wanted);
  const Gradients cut_gradients = gradients(active_runner(), c, whole);
  set_executor(before);
  expect_same(c, whole, cut);
  expect_same(c, whole_gradients, cut_gradients);
  for (const Direction d : {Direction::rowwise, Direction::columnwise})
    EXPECT_EQ(difference(whole.out.quantized->side(d).data, cut.out.quantized->side(d).data), "");
}

class QuantizedNorm : public EveryRunner {};

TEST_P(QuantizedNorm, BytesAreThoseOfQuantizingTheResult) {
  uint64_t turn = 0;
  for (const QuantSpec& spec : plain_specs()) {
    if (spec.stochastic) continue;
    for (const InputShape shape : {InputShape{0, 40}, {5, 0}, {37, 70, 1}, {260, 33}, {129, 272}}) {
      if (shape.rows > 100 && spec.epsilon > 0) continue;  // the reference is slow
      const DType out = kFloatTypes[++turn % 3];
      const Case c(kKinds[turn % 2], shape, {kFloatTypes[turn / 3 % 3], DType::f32, out}, Kind::special, turn);
      const Normed plain = normed(active_runner(), c);
      const Wanted wanted{
          .y = turn % 2 == 0, .spec = spec, .directions = {turn % 5 != 0, turn % 7 != 0 || turn % 5 == 0}};
      const Normed n = normed(GetParam(), c, wanted);
      SCOPED_TRACE(text(spec.to_string(), " of ", name(out), " [", shape.rows, ", ", shape.cols, "]"));
      expect_quantized(plain.out.y, out, *n.out.quantized, wanted);
      if (wanted.y) {
        ASSERT_EQ(value_difference(plain.out.y, n.out.y, out), "");
      }
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(QuantizedNorm, AGivenScaleIsUsedAndTheAmaxMeasured) {
  const float scale = 17.5f;
  const Wanted wanted{.y = false, .spec = QuantSpec::parse("fp8_tensor"), .scale = &scale};
  const Case c(NormKind::layer, {300, 65}, {DType::bf16, DType::bf16, DType::bf16}, Kind::normal, 3);
  expect_quantized(normed(active_runner(), c).out.y, c.out, *normed(GetParam(), c, wanted).out.quantized, wanted);
}

QUIRE_FOR_EVERY_RUNNER(QuantizedNorm);

std::string error_of(const NormProblem& p) {
  try {
    norm(p);
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

TEST(NormValidation, NamesWhatIsWrong) {
  const Case c(NormKind::layer, {4, 8}, {DType::f32, DType::f32, DType::f32}, Kind::normal, 1);
  Guarded y(4 * 8 * 4);
  const NormProblem good = c.problem({.y = {y.data(), DType::f32, 4, 8, 8}}, nullptr, nullptr);
  EXPECT_EQ(error_of(good), "no error");
  NormProblem p = good;
  p.eps = -1;
  EXPECT_NE(error_of(p).find("eps must be finite and not negative; got -1"), std::string::npos);
  p = good;
  p.gamma.data = nullptr;
  EXPECT_NE(error_of(p).find("gamma of [8] is a null pointer"), std::string::npos);
  p = good;
  p.out.y.cols = 7;
  EXPECT_NE(error_of(p).find("y must be [4, 8]; got [4, 7]"), std::string::npos);
  p = good;
  p.out.spec = QuantSpec::parse("nvfp4:sr");
  EXPECT_NE(error_of(p).find("rounds stochastically"), std::string::npos);
  p = good;
  p.out.rowwise.scale = y.data();
  EXPECT_NE(error_of(p).find("rowwise_data"), std::string::npos);
}

TEST(NormValidation, KernelsExplainThemselves) {
  const Case c(NormKind::rms, {4, 8}, {DType::f32, DType::f32, DType::f32}, Kind::normal, 1);
  EXPECT_EQ(explain(c.problem({.y = {nullptr, DType::f32, 4, 8, 8}}, nullptr, nullptr)),
            "generic: runs\nreference: not asked, generic comes first\n");
}

}  // namespace
}  // namespace quire::testing
