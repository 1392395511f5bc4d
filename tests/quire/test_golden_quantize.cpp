// Every quantizer against the golden vectors, byte for byte: the reference first, then the instruction set in use.
#include "golden_cases.h"
#include "quantized.h"
#include "quire/operations/operations.h"

namespace quire::testing {
namespace {

constexpr Direction kRow = Direction::rowwise, kCol = Direction::columnwise;

class GoldenQuantize : public EveryRunner {
 protected:
  Quantized run(const golden::Case& c, const std::string& spec, const QuantizeOptions& options = {}) const {
    return quantized(GetParam(), QuantSpec::parse(spec), input(c), options);
  }

  void expect_equal(const golden::Case& c, const std::string& tensor, const Guarded& actual) const {
    const golden::Tensor& t = c.at(tensor);
    ASSERT_EQ(byte_count(t), actual.size()) << tensor;
    EXPECT_EQ(difference(t.ptr, actual.data(), actual.size()), "") << tensor;
  }

  void expect_dequantized(const golden::Case& c, const std::string& tensor, const Quantized& q, Direction d) const {
    if (!c.has(tensor)) return;
    const std::vector<float> values = dequantized(GetParam(), q, d);
    ASSERT_EQ(c.at(tensor).numel(), static_cast<int64_t>(values.size())) << tensor;
    EXPECT_EQ(float_difference(c.data<float>(tensor), values.data(), c.at(tensor).numel()), "") << tensor;
  }

  /// Codes, scales and amax of a direction, whichever of them the case has.
  void expect_side(const golden::Case& c, const std::string& suffix, const Quantized& q, Direction d) const {
    const std::string scale = c.has("scale_inv" + suffix) ? "scale_inv" + suffix : "scale" + suffix;
    expect_equal(c, "codes" + suffix, q.side(d).data);
    expect_equal(c, scale, q.side(d).scale);
    if (c.has("amax" + suffix)) expect_equal(c, "amax" + suffix, q.side(d).amax);
    expect_dequantized(c, "dequant" + suffix, q, d);
  }

  void expect_transposed(const golden::Case& c, const std::string& tensor, const Quantized& q) const {
    const auto* codes = c.data<uint8_t>(tensor);
    const auto* columnwise = q.side(kCol).data.as<uint8_t>();
    for (int64_t i = 0; i < q.rows; ++i)
      for (int64_t j = 0; j < q.cols; ++j)
        ASSERT_EQ(int{codes[i * q.cols + j]}, int{columnwise[j * q.rows + i]}) << "element " << i << ", " << j;
  }
};

std::string fp8_options(const golden::Case& c) {
  std::string out = field(c, "elem") == "e5m2" ? ":e5m2" : "";
  if (field(c, "dim") == "2") out += ":128x128";
  if (flag(c, "pow2")) out += ":pow2";
  const float eps = std::stof(field(c, "eps", "0"));
  return eps == 0 ? out : out + text(":eps=", eps);
}

TEST_P(GoldenQuantize, PerTensorCurrentScalingGivesTheGoldenBytes) {
  for (const golden::Case* c : golden_group("current", 123)) {
    SCOPED_TRACE(c->id);
    const Quantized q = run(*c, "fp8_tensor" + fp8_options(*c));
    expect_side(*c, "", q, kRow);
    expect_transposed(*c, "codes", q);
    EXPECT_EQ(difference(q.side(kRow).scale, q.side(kCol).scale), "");
    EXPECT_EQ(difference(q.side(kRow).amax, q.side(kCol).amax), "");
  }
}

TEST_P(GoldenQuantize, CastUnderAGivenScaleGivesTheGoldenBytesAndTheAmax) {
  for (const golden::Case* c : golden_group("delayed_cast", 42)) {
    SCOPED_TRACE(c->id);
    const Quantized q = run(*c, "fp8_tensor" + fp8_options(*c), {.scale = c->data<float>("scale")});
    expect_side(*c, "", q, kRow);
    expect_transposed(*c, "codes", q);
  }
}

TEST_P(GoldenQuantize, BlockScalingGivesTheGoldenBytes) {
  for (const golden::Case* c : golden_group("block", 130)) {
    SCOPED_TRACE(c->id);
    const Quantized q = run(*c, "fp8_block" + fp8_options(*c));
    expect_side(*c, "_row", q, kRow);
    expect_side(*c, "_col", q, kCol);
  }
}

TEST_P(GoldenQuantize, Mxfp8GivesTheGoldenBytes) {
  for (const golden::Case* c : golden_group("mxfp8", 117)) {
    SCOPED_TRACE(c->id);
    const Quantized q = run(*c, "mxfp8" + fp8_options(*c) + (flag(*c, "two_d") ? ":32x32" : ""));
    expect_side(*c, "_row", q, kRow);
    expect_equal(*c, "codes_col", q.side(kCol).data);
    expect_equal(*c, "scale_col", q.side(kCol).scale);
    if (!c->has("dequant_col")) continue;
    // The golden tensor is [M, K] as stored; decoding gives [K, M].
    const std::vector<float> values = dequantized(GetParam(), q, kCol);
    for (int64_t i = 0; i < q.rows; ++i)
      for (int64_t j = 0; j < q.cols; ++j)
        ASSERT_EQ(float_difference(c->data<float>("dequant_col") + i * q.cols + j,
                                   &values[static_cast<size_t>(j * q.rows + i)], 1),
                  "")
            << "element " << i << ", " << j;
  }
}

TEST_P(GoldenQuantize, Nvfp4GivesTheGoldenBytes) {
  size_t stochastic = 0;
  for (const golden::Case* c : golden_group("nvfp4", 144)) {
    SCOPED_TRACE(c->id);
    // Golden stochastic cases name their random bytes; a kernel draws its own, so only scales and amaxes compare here.
    const bool sr = flag(*c, "sr");
    const Quantized q = run(*c, std::string("nvfp4") + (flag(*c, "two_d") ? ":16x16" : "") +
                                    (flag(*c, "row_scaled") ? ":row_scaled" : "") + (sr ? ":sr" : ""));
    stochastic += sr;
    if (!sr) expect_side(*c, "_row", q, kRow);
    if (!sr && c->has("codes_col")) expect_side(*c, "_col", q, kCol);
    if (sr) expect_equal(*c, "scale_row", q.side(kRow).scale);
    if (sr) expect_equal(*c, "amax_row", q.side(kRow).amax);
  }
  EXPECT_EQ(stochastic, 26u);
}

TEST_P(GoldenQuantize, FourOverSixGivesTheGoldenBytes) {
  for (const golden::Case* c : golden_group("nvfp4_4over6", 136)) {
    SCOPED_TRACE(c->id);
    const Quantized q = run(*c, std::string("nvfp4") + (flag(*c, "two_d") ? ":16x16" : "") +
                                    (field(*c, "mode") == "MAE" ? ":4over6=mae" : ":4over6=mse") +
                                    (field(*c, "e4m3_max") == "256" ? ":256" : ""));
    expect_side(*c, "_row", q, kRow);
    expect_side(*c, "_col", q, kCol);
  }
}

std::string rht_option(const golden::Case& c) { return field(c, "sign_mask") == "0x0000" ? ":rht=unsigned" : ":rht"; }

TEST_P(GoldenQuantize, HadamardTransformedColumnsGiveTheGoldenBytes) {
  for (const golden::Case* c : golden_group("nvfp4_rht", 34)) {
    SCOPED_TRACE(c->id);
    const QuantizeOptions columns{.directions = {false, true}};
    expect_side(*c, "_col", run(*c, "nvfp4" + rht_option(*c), columns), kCol);
    const Quantized sr = run(*c, "nvfp4" + rht_option(*c) + ":sr", columns);
    expect_equal(*c, "scale_col_sr", sr.side(kCol).scale);
  }
}

TEST_P(GoldenQuantize, TheTransformSumsInTheOrderOfTheButterfly) {
  for (const golden::Case* c : golden_group("rht_butterfly", 24)) {
    SCOPED_TRACE(c->id);
    expect_side(*c, "_col", run(*c, "nvfp4" + rht_option(*c), {.directions = {false, true}}), kCol);
  }
}

TEST_P(GoldenQuantize, StochasticRoundingDrawsTheBitsOfSeedOffsetAndBlock) {
  size_t tensors = 0;
  for (const golden::Case* c : golden_group("sr_mapping", 18)) {
    if (field(*c, "kind") != "sr_mapping") continue;
    SCOPED_TRACE(c->id);
    const uint64_t seed = unsigned_field(*c, "seed"), offset = unsigned_field(*c, "offset");
    const Quantized q = run(*c, flag(*c, "rht") ? "nvfp4:rht:sr" : "nvfp4:sr",
                            {.random = {.seed = seed, .rowwise_offset = offset, .columnwise_offset = offset}});
    expect_side(*c, "_row", q, kRow);
    expect_side(*c, "_col", q, kCol);
    ++tensors;
  }
  EXPECT_EQ(tensors, 10u);
}

TEST_P(GoldenQuantize, AnAbsentDirectionChangesNothingInTheOther) {
  for (const golden::Case* c : golden_group("nvfp4", 144)) {
    if (flag(*c, "sr") || !c->has("codes_col")) continue;
    SCOPED_TRACE(c->id);
    const std::string spec =
        std::string("nvfp4") + (flag(*c, "two_d") ? ":16x16" : "") + (flag(*c, "row_scaled") ? ":row_scaled" : "");
    expect_side(*c, "_row", run(*c, spec, {.directions = {true, false}}), kRow);
    expect_side(*c, "_col", run(*c, spec, {.directions = {false, true}}), kCol);
  }
}

QUIRE_FOR_EVERY_RUNNER(GoldenQuantize);

}  // namespace
}  // namespace quire::testing
