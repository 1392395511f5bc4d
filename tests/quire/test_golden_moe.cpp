// The golden mixture of experts, stage by stage and as a whole.
#include <algorithm>
#include <cmath>

#include "golden_cases.h"
#include "mixtures.h"
#include "products.h"
#include "quire/operations/operations.h"

namespace quire::testing {
namespace {

struct Formats {
  std::string_view id, x, w;
  double bound;  ///< relative Frobenius error of y that the vectors' page gives
};
constexpr Formats kGolden[] = {{"moe/current", "fp8_tensor", "fp8_tensor", 6e-3},
                               {"moe/block", "fp8_block:pow2", "fp8_block:128x128:pow2", 6e-3},
                               {"moe/mxfp8", "mxfp8", "mxfp8", 6e-3},
                               {"moe/nvfp4", "nvfp4", "nvfp4:16x16", 1.5e-2}};

/// How far apart two bfloat16 are that stand next to each other near v.
double step(double v) { return v == 0 ? 0x1p-133 : std::ldexp(1.0, std::max(-133, std::ilogb(v) - 7)); }

/// got is within a bfloat16 step, and `bound` [got's elements] if given, of the golden rows, which rows of padding may
/// follow.
void expect_within_a_step(const golden::Case& c, const std::string& name, const Matrix& got,
                          const std::vector<double>& bound = {}) {
  const Matrix expected = matrix(c, name, "bf16");
  ASSERT_EQ(expected.cols, got.cols) << name;
  ASSERT_GE(expected.rows, got.rows) << name;
  for (int64_t i = 0; i < got.rows; ++i)
    for (int64_t j = 0; j < got.cols; ++j) {
      const double e = at(expected, i, j), more = bound.empty() ? 0 : bound[static_cast<size_t>(i * got.cols + j)];
      ASSERT_NEAR(e, at(got, i, j), step(e) + more) << name << " row " << i << " column " << j;
    }
}

/// What a product of x [T, K] and w [N, K] may be off by before its rounding (gemm.h).
std::vector<double> product_bound(const Matrix& x, const QuantSpec& x_spec, const Matrix& w, const QuantSpec& w_spec) {
  const auto quantized_of = [](const Matrix& m, const QuantSpec& spec) {
    Quantized q = quantized(reference_runner(), spec, m, {.directions = {true, false}});
    return OwnedOperand{std::make_unique<Quantized>(std::move(q)), Direction::rowwise};
  };
  std::vector<double> out = magnitudes(quantized_of(x, x_spec), quantized_of(w, w_spec));
  for (double& m : out) m *= static_cast<double>(x.cols + 6) * 0x1p-24;
  return out;
}

/// Rows in bfloat16, in memory of their own.
struct Rows {
  Rows(int64_t rows, int64_t cols)
      : memory(static_cast<size_t>(rows * cols)), matrix{memory.data(), DType::bf16, rows, cols, cols} {}
  std::vector<uint16_t> memory;
  MutableMatrix matrix;
};

/// x quantized, times the weight.
void run_product(const PreparedWeight& w, const Matrix& x, const QuantSpec& spec, const MutableMatrix& out) {
  CallMemory memory;
  const PlannedCodes planned(memory, spec, {x.rows, x.cols}, 0);
  memory.lend(host());
  const RowCodes codes = planned.in(memory, {});
  quantize(w.quantization(x, spec, codes));
  gemm(w.product(codes, spec, out));
}

TEST(GoldenMoe, EveryStageOfEveryExpertIsWithinAStepOfTheGoldenOne) {
  golden_group("moe", std::size(kGolden));
  for (const Formats& f : kGolden) {
    const golden::Case& c = *std::find_if(golden_pack().cases.begin(), golden_pack().cases.end(),
                                          [&](const golden::Case& each) { return each.id == f.id; });
    SCOPED_TRACE(c.id);
    const QuantSpec x_spec = QuantSpec::parse(f.x), w_spec = QuantSpec::parse(f.w);
    const int64_t count = c.at("w13").shape[0];
    const Matrix x = matrix(c, "x", "bf16"), w13 = matrix(c, "w13", "bf16"), w2 = matrix(c, "w2", "bf16");
    for (int64_t e = 0; e < count; ++e) {
      const std::string suffix = "_" + std::to_string(e);
      const PreparedWeight first(slice(w13, e * w13.rows / count, w13.rows / count), w_spec),
          second(slice(w2, e * x.cols, x.cols), w_spec);
      const golden::Tensor& tokens = c.at("tokens" + suffix);
      const Rows rows_memory(tokens.numel(), x.cols);
      const MutableMatrix rows = rows_memory.matrix;
      for (int64_t i = 0; i < rows.rows; ++i)
        for (int64_t j = 0; j < x.cols; ++j)
          store_element(rows.data, DType::bf16, i * x.cols + j,
                        static_cast<float>(at(x, c.data<int32_t>("tokens" + suffix)[i], j)));

      const Rows h_memory(rows.rows, first.out_features());
      const MutableMatrix h = h_memory.matrix;
      run_product(first, rows, x_spec, h);
      expect_within_a_step(c, "h" + suffix, h, product_bound(rows, x_spec, slice(w13, e * h.cols, h.cols), w_spec));

      const Rows act_memory(rows.rows, second.in_features());
      const MutableMatrix act = act_memory.matrix;
      activation({.activation = Activation::parse("swiglu"),
                  .x = slice(matrix(c, "h" + suffix, "bf16"), 0, rows.rows),
                  .out = {.y = act}});
      expect_within_a_step(c, "act" + suffix, act);

      const Rows out_memory(rows.rows, x.cols);
      const MutableMatrix out = out_memory.matrix;
      const Matrix golden_act = slice(matrix(c, "act" + suffix, "bf16"), 0, rows.rows);
      run_product(second, golden_act, x_spec, out);
      expect_within_a_step(c, "out" + suffix, out,
                           product_bound(golden_act, x_spec, slice(w2, e * x.cols, x.cols), w_spec));
    }
  }
}

TEST(GoldenMoe, TheWholeIsWithinTheBoundOfTheGoldenResult) {
  for (const Formats& f : kGolden) {
    const golden::Case& c = *std::find_if(golden_pack().cases.begin(), golden_pack().cases.end(),
                                          [&](const golden::Case& each) { return each.id == f.id; });
    SCOPED_TRACE(c.id);
    const Matrix x = matrix(c, "x", "bf16");
    MoeRunner runner(
        experts_of(matrix(c, "w13", "bf16"), matrix(c, "w2", "bf16"), c.at("w13").shape[0], QuantSpec::parse(f.w)),
        {.x = QuantSpec::parse(f.x), .activation = Activation::parse("swiglu")});
    const Guarded y = result_of(runner, x,
                                {.ids = c.data<int32_t>("expert_index"),
                                 .weights = c.data<float>("expert_weight"),
                                 .tokens = x.rows,
                                 .top_k = c.num("top_k")});
    double error = 0, norm = 0;
    for (int64_t i = 0; i < x.rows * x.cols; ++i) {
      const double expected = c.data<double>("y")[i];
      const double difference = expected - static_cast<double>(load_element(y.data(), DType::bf16, i));
      error += difference * difference;
      norm += expected * expected;
    }
    EXPECT_LT(std::sqrt(error / norm), f.bound);
  }
}

}  // namespace
}  // namespace quire::testing
