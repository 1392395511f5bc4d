// The three products of a linear layer against the golden vectors: operands byte for byte, results within the bound
// that gemm.h states.
#include <cmath>

#include "golden_cases.h"
#include "quantized.h"
#include "quire/format/half.h"
#include "quire/operations/operations.h"
#include "quire/spec/linear_spec.h"

namespace quire::testing {
namespace {

constexpr Direction kRow = Direction::rowwise, kCol = Direction::columnwise;

struct Recipe {
  std::string_view id;
  std::string_view spec;
};

constexpr Recipe kRecipes[] = {
    {"linear/current_hybrid", "x=fp8_tensor,w=fp8_tensor,dy=fp8_tensor:e5m2"},
    {"linear/current_e4m3", "x=fp8_tensor,w=fp8_tensor,dy=fp8_tensor"},
    {"linear/delayed_hybrid", "x=fp8_tensor,w=fp8_tensor,dy=fp8_tensor:e5m2"},
    {"linear/block_pow2", "x=fp8_block:pow2,w=fp8_block:128x128:pow2,dy=fp8_block:pow2"},
    {"linear/block_fp32", "x=fp8_block,w=fp8_block:128x128,dy=fp8_block"},
    {"linear/mxfp8", "x=mxfp8,w=mxfp8,dy=mxfp8"},
    {"linear/mxfp8_w2d", "x=mxfp8,w=mxfp8:32x32,dy=mxfp8"},
    {"linear/nvfp4_rht_nosr", "x=nvfp4:rht,w=nvfp4:16x16,dy=nvfp4:rht"},
    {"linear/nvfp4_norht_nosr", "x=nvfp4,w=nvfp4:16x16,dy=nvfp4"},
    {"linear/nvfp4_4over6_norht", "x=nvfp4:4over6=mae:256,w=nvfp4:16x16:4over6=mae:256,dy=nvfp4"},
};

std::string_view spec_of(const golden::Case& c) {
  for (const Recipe& r : kRecipes)
    if (r.id == c.id) return r.spec;
  fail("no recipe for ", c.id);
}

class GoldenLinear : public EveryRunner {
 protected:
  Quantized operand(const golden::Case& c, const std::string& tensor, const QuantSpec& spec) const {
    const std::string scale = field(c, "scale_" + tensor);
    const float given = scale.empty() ? 0 : std::stof(scale);
    const Quantized q =
        quantized(GetParam(), spec, matrix(c, tensor, "bf16"), {.scale = scale.empty() ? nullptr : &given});
    const std::string prefix = tensor == "dy" ? "g" : tensor;
    for (const Direction d : {kRow, kCol}) {
      const std::string name = prefix + (d == kRow ? "_row_" : "_col_");
      EXPECT_EQ(difference(c.at(name + "codes").ptr, q.side(d).data.data(), q.side(d).data.size()), "") << name;
      EXPECT_EQ(difference(c.at(name + "scales").ptr, q.side(d).scale.data(), q.side(d).scale.size()), "") << name;
      if (!c.has(name + "amax")) continue;
      EXPECT_EQ(difference(c.at(name + "amax").ptr, q.side(d).amax.data(), q.side(d).amax.size()), "") << name;
    }
    return q;
  }

  /// a b^T (+ bias) against the tensor `name` of float64 and the bound from its sums of magnitudes.
  void expect_product(const golden::Case& c, const std::string& name, GemmProblem p) const {
    const golden::Tensor& expected = c.at(name);
    Guarded out(expected.numel() * 4);
    p.out = {out.data(), DType::f32, p.a.outer, p.b.outer, p.b.outer};
    ASSERT_EQ(expected.shape, (std::vector<int64_t>{p.a.outer, p.b.outer}));
    GetParam().run.gemm(p);
    EXPECT_TRUE(out.intact()) << "wrote outside of " << name;
    const double unit = static_cast<double>(p.a.contraction + 6) * 0x1p-24;
    for (int64_t i = 0; i < expected.numel(); ++i) {
      const double y = c.data<double>(name)[i], bound = unit * static_cast<double>(c.data<float>(name + "_abs")[i]);
      ASSERT_NEAR(y, static_cast<double>(out.as<float>()[i]), bound) << name << " element " << i;
    }
  }
};

TEST_P(GoldenLinear, OperandsAreTheGoldenBytesAndProductsWithinTheBound) {
  for (const golden::Case* c : golden_group("linear", 10)) {
    SCOPED_TRACE(c->id);
    const LinearSpec spec = LinearSpec::parse(spec_of(*c));
    const Quantized x = operand(*c, "x", spec.x), w = operand(*c, "w", spec.w), dy = operand(*c, "dy", spec.dy);
    expect_product(
        *c, "y",
        {.a = x.operand(kRow), .b = w.operand(kRow), .out = {}, .bias = c->at("bias").ptr, .bias_dtype = DType::bf16});
    expect_product(*c, "dx", {.a = dy.operand(kRow), .b = w.operand(kCol), .out = {}});
    expect_product(*c, "dw", {.a = dy.operand(kCol), .b = x.operand(kCol), .out = {}});
  }
}

TEST_P(GoldenLinear, ColumnSumOfTheGradientIsTheGoldenBiasGradient) {
  for (const golden::Case* c : golden_group("linear", 10)) {
    SCOPED_TRACE(c->id);
    const Matrix dy = matrix(*c, "dy", "bf16");
    Guarded out(dy.cols * 4);
    GetParam().run.column_sum({dy, out.data(), DType::f32});
    EXPECT_TRUE(out.intact());
    for (int64_t j = 0; j < dy.cols; ++j) {
      double magnitudes = 0;
      for (int64_t i = 0; i < dy.rows; ++i)
        magnitudes +=
            std::fabs(static_cast<double>(bf16_to_f32(static_cast<const uint16_t*>(dy.data)[i * dy.cols + j])));
      EXPECT_NEAR(c->data<double>("db")[j], static_cast<double>(out.as<float>()[j]),
                  static_cast<double>(dy.rows) * 0x1p-24 * magnitudes);
    }
  }
}

QUIRE_FOR_EVERY_RUNNER(GoldenLinear);

}  // namespace
}  // namespace quire::testing
