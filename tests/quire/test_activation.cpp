// Activation functions: against double within the bounds of numerics.md 11.3, kernels against the reference bit for
// bit, and quantized results against quantizing the result.
#include <cmath>

#include "inputs.h"
#include "produced.h"
#include "quire/base/parallel.h"
#include "quire/operations/operations.h"
#include "specs.h"

namespace quire::testing {
namespace {

constexpr InputShape kShapes[] = {{0, 5}, {3, 0}, {1, 1}, {2, 15, 3, 1}, {5, 256}, {4, 257, 1}, {130, 8}, {40, 600}};
const char* const kTexts[] = {"gelu",
                              "geglu",
                              "glu",
                              "qgelu",
                              "qgeglu",
                              "relu",
                              "reglu",
                              "srelu",
                              "sreglu",
                              "silu",
                              "swiglu",
                              "clamped_swiglu",
                              "clamped_swiglu:limit=0.75:alpha=1:glu_linear_offset=0"};

TEST(Exp, IsWithinTwoUnitsOfDoubleForEveryKindOfNumber) {
  for (uint32_t bits = 0; bits < 0x7F800000u; bits += 4093)
    for (const float x : {std::bit_cast<float>(bits), -std::bit_cast<float>(bits)}) {
      const double exact = std::exp(static_cast<double>(x)), got = static_cast<double>(exp_f32(x));
      if (exact > 0x1.FFFFFEp127) {
        ASSERT_TRUE(std::isinf(got) || exact < 0x1.FFFFFEp127 * (1 + 0x1p-23)) << x;
      } else {
        ASSERT_NEAR(exact, got, exact >= 0x1p-126 ? 2 * 0x1p-24 * exact : 0x1p-149) << x;
      }
      const double sigmoid = 1 / (1 + std::exp(-static_cast<double>(x)));
      ASSERT_NEAR(sigmoid, static_cast<double>(sigmoid_f32(x)), 4 * 0x1p-24 * sigmoid + 0x1p-126) << x;
    }
  EXPECT_TRUE(std::isnan(exp_f32(std::nanf(""))));
  EXPECT_EQ(exp_f32(-std::numeric_limits<float>::infinity()), 0.0f);
  EXPECT_EQ(exp_f32(std::numeric_limits<float>::infinity()), std::numeric_limits<float>::infinity());
  EXPECT_EQ(exp_f32(0.0f), 1.0f);
}

struct Case {
  Activation activation;
  Input x, dy;
  DType out;

  Case(std::string_view text, InputShape shape, std::array<DType, 2> dtypes, Kind values, uint64_t seed)
      : activation(Activation::parse(text)),
        x({shape.rows, shape.cols * activation.inputs(), shape.padding, shape.lead}, dtypes[0], values, seed),
        dy({shape.rows, shape.cols}, dtypes[1], values, seed + 1),
        out(dtypes[1]) {}

  int64_t rows() const { return Matrix(dy).rows; }
  int64_t cols() const { return Matrix(dy).cols; }
};

Produced activated(const Runner& runner, const Case& c, const Wanted& wanted = {}) {
  return produced(c.rows(), c.cols(), c.out, wanted,
                  [&](const Destination& to) { runner.run.activation({c.activation, c.x, to}); });
}

Guarded gradient(const Runner& runner, const Case& c) {
  const Matrix x = c.x;
  Guarded dx(x.rows * x.cols * size_of(x.dtype));
  runner.run.activation_grad({c.activation, c.dy, x, {dx.data(), x.dtype, x.rows, x.cols, x.cols}});
  EXPECT_TRUE(dx.intact());
  return dx;
}

/// In double: the curve's value and slope, the magnitudes of their terms, and the argument of its exponential.
struct Exact {
  double value, slope, slope_terms, argument;
};

Exact with_sigmoid(double x, double g, double dg) {
  const double s = 1 / (1 + std::exp(-g));
  return {x * s, s + x * s * (1 - s) * dg, s + std::fabs(x * s * dg), g};
}

Exact exact(const Activation& a, double x) {
  const double alpha = static_cast<double>(a.alpha);
  switch (a.row().curve) {
    case Curve::sigmoid: {
      const double s = 1 / (1 + std::exp(-x));
      return {s, s * (1 - s), s, x};
    }
    case Curve::gelu: {
      // As textbooks have it: x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))).
      const double h = std::sqrt(2 / std::acos(-1.0)) * (x + 0.044715 * x * x * x);
      const double dh = std::sqrt(2 / std::acos(-1.0)) * (1 + 3 * 0.044715 * x * x), t = std::tanh(h);
      const double tail = 1 / (std::cosh(h) * std::cosh(h)),
                   s = h < 0 ? std::exp(2 * h) / (1 + std::exp(2 * h)) : (1 + t) / 2;
      return {x * s, s + 0.5 * x * tail * dh, s + std::fabs(2 * x * s * dh), 2 * h};
    }
    case Curve::swish:
      return with_sigmoid(x, alpha * x, alpha);
    case Curve::relu:
      return {std::max(x, 0.0), x > 0 ? 1.0 : 0.0, 1, 0};
    case Curve::squared_relu:
      return {x > 0 ? x * x : 0, 2 * std::max(x, 0.0), 2 * std::fabs(x), 0};
  }
  return {};
}

double element(const Matrix& m, int64_t i, int64_t j) {
  return static_cast<double>(load_element(m.data, m.dtype, i * m.row_stride + j));
}

void expect_near(double expected, double bound, const Guarded& got, DType dtype, int64_t index) {
  ASSERT_NEAR(expected, static_cast<double>(load_element(got.data(), dtype, index)),
              bound + unit(dtype) * (std::fabs(expected) + bound) + tiny(dtype));
}

void expect_element(const Case& c, const Guarded& y, const Guarded& dx, int64_t i, int64_t j) {
  const Activation& a = c.activation;
  const double limit = static_cast<double>(a.limit), u = 0x1p-24, dy = element(c.dy, i, j);
  double x = element(c.x, i, j), up = a.row().gated ? element(c.x, i, c.cols() + j) : 1;
  const bool x_moves = !a.row().clamped || x <= limit, up_moves = !a.row().clamped || std::fabs(up) <= limit;
  if (a.row().clamped) {
    x = std::min(x, limit);
    up = std::clamp(up, -limit, limit) + static_cast<double>(a.offset);
  }
  const Exact e = exact(a, x);
  const double units = (8 + 4 * std::fabs(e.argument)) * u;
  expect_near(e.value * up, units * std::fabs(e.value * up), y, c.out, i * c.cols() + j);
  const DType dtype = Matrix(c.x).dtype;
  const int64_t at = i * Matrix(c.x).cols + j;
  expect_near(x_moves ? dy * up * e.slope : 0, 2 * units * std::fabs(dy * up) * e.slope_terms, dx, dtype, at);
  if (a.row().gated)
    expect_near(up_moves ? dy * e.value : 0, units * std::fabs(dy * e.value), dx, dtype, at + c.cols());
}

/// Calls body(case) for all activations, shapes and dtypes in turn.
template <class Body>
void for_each_case(std::initializer_list<Kind> kinds, const Body& body) {
  uint64_t turn = 0;
  for (const char* activation : kTexts)
    for (const InputShape& shape : kShapes)
      for (const DType in : kFloatTypes)
        for (const Kind values : kinds) {
          ++turn;
          const Case c(activation, shape, {in, kFloatTypes[turn % 3]}, values, turn);
          SCOPED_TRACE(text(activation, " of ", name(in), " [", shape.rows, ", ", shape.cols, "] ",
                            kKindNames[static_cast<size_t>(values)], " to ", name(c.out)));
          body(c);
          if (::testing::Test::HasFatalFailure()) return;
        }
}

class ActivationFunction : public EveryRunner {};

TEST_P(ActivationFunction, AndItsGradientAreWithinTheirBoundsOfDouble) {
  for_each_case({Kind::normal, Kind::ties}, [](const Case& c) {
    const Guarded y = activated(GetParam(), c).y, dx = gradient(GetParam(), c);
    for (int64_t i = 0; i < c.rows(); ++i)
      for (int64_t j = 0; j < c.cols(); ++j) {
        expect_element(c, y, dx, i, j);
        if (HasFatalFailure()) {
          FAIL() << "row " << i << " column " << j << " x " << element(c.x, i, j);
        }
      }
  });
}

QUIRE_FOR_EVERY_RUNNER(ActivationFunction);

TEST(ActivationParity, EveryInputGivesTheBitsOfTheReference) {
  for_each_case({Kind::normal, Kind::wide, Kind::special, Kind::huge, Kind::zeros}, [](const Case& c) {
    ASSERT_EQ(value_difference(activated(reference_runner(), c).y, activated(active_runner(), c).y, c.out), "");
    ASSERT_EQ(value_difference(gradient(reference_runner(), c), gradient(active_runner(), c), Matrix(c.x).dtype), "");
  });
}

class QuantizedActivation : public EveryRunner {};

TEST_P(QuantizedActivation, BytesAreThoseOfQuantizingTheResult) {
  uint64_t turn = 0;
  for (const QuantSpec& spec : plain_specs()) {
    if (spec.stochastic) continue;
    for (const InputShape shape : {InputShape{0, 40}, {5, 0}, {37, 70, 1}, {130, 33}}) {
      const DType out = kFloatTypes[++turn % 3];
      const Case c(kTexts[turn % std::size(kTexts)], shape, {kFloatTypes[turn / 3 % 3], out}, Kind::special, turn);
      const Produced plain = activated(active_runner(), c);
      const Wanted wanted{
          .y = turn % 2 == 0, .spec = spec, .directions = {turn % 5 != 0, turn % 7 != 0 || turn % 5 == 0}};
      const Produced p = activated(GetParam(), c, wanted);
      SCOPED_TRACE(text(spec.to_string(), " of ", name(out), " [", shape.rows, ", ", shape.cols, "]"));
      expect_quantized(plain.y, out, *p.quantized, wanted);
      if (wanted.y) {
        ASSERT_EQ(value_difference(plain.y, p.y, out), "");
      }
      if (HasFatalFailure()) return;
    }
  }
}

QUIRE_FOR_EVERY_RUNNER(QuantizedActivation);

TEST(ActivationParity, DoesNotDependOnHowWorkIsCut) {
  const Wanted wanted{.spec = QuantSpec::parse("mxfp8")};
  const Case c("swiglu", {700, 90}, {DType::bf16, DType::bf16}, Kind::normal, 5);
  const Produced whole = activated(active_runner(), c, wanted);
  const Guarded whole_gradient = gradient(active_runner(), c);
  const Executor before = set_executor([](int64_t count, int64_t grain, const auto& body) {
    const int64_t step = std::max<int64_t>(grain, 1);
    for (int64_t begin = (count - 1) / step * step; begin >= 0; begin -= step)
      body(begin, std::min(begin + step, count));
  });
  const Produced cut = activated(active_runner(), c, wanted);
  EXPECT_EQ(difference(whole_gradient, gradient(active_runner(), c)), "");
  set_executor(before);
  EXPECT_EQ(difference(whole.y, cut.y), "");
  for (const Direction d : {Direction::rowwise, Direction::columnwise})
    EXPECT_EQ(difference(whole.quantized->side(d).data, cut.quantized->side(d).data), "");
}

TEST(ActivationText, IsCanonicalAndErrorsPointAtTheWrongPart) {
  for (const char* text : kTexts)
    EXPECT_EQ(Activation::parse(Activation::parse(text).to_string()), Activation::parse(text));
  EXPECT_EQ(Activation::parse("clamped_swiglu:limit=7:alpha=1.702:glu_linear_offset=1").to_string(), "clamped_swiglu");
  const auto error_of = [](std::string_view text) -> std::string {
    try {
      Activation::parse(text);
    } catch (const Error& e) {
      return e.what();
    }
    return "no error";
  };
  EXPECT_NE(error_of("no_such").find("'no_such' names no activation; use one of gelu, geglu, glu"), std::string::npos);
  EXPECT_NE(error_of("swiglu:limit=1").find("no parameter of swiglu, which takes none"), std::string::npos);
  EXPECT_NE(error_of("clamped_swiglu:limit=").find("takes limit=F"), std::string::npos);
  EXPECT_NE(error_of("clamped_swiglu:limit=inf").find("finite"), std::string::npos);
  EXPECT_NE(error_of("clamped_swiglu:limit=-1").find("must not be negative"), std::string::npos);
}

TEST(ActivationValidation, AGatedOneNeedsTwoHalves) {
  const Input x({4, 7}, DType::f32, Kind::normal, 1);
  Guarded y(4 * 3 * 4);
  try {
    activation({Activation::parse("swiglu"), x, {.y = {y.data(), DType::f32, 4, 3, 3}}});
    FAIL();
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("swiglu is gated and takes two halves of x; got 7 columns"),
              std::string::npos);
  }
}

}  // namespace
}  // namespace quire::testing
