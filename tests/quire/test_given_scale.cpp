// Scales that come with the call (numerics.md 2.5, 5.9): stored as they are, and what is quantized under them.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "inputs.h"
#include "produced.h"
#include "quantized.h"
#include "quire/format/codec.h"

namespace quire::testing {
namespace {

class GivenScale : public EveryRunner {};
QUIRE_FOR_EVERY_RUNNER(GivenScale);

/// Whose reciprocal does not give them back, some of them.
constexpr float kScales[] = {0.0123f, 1.0f, 0.3f, 7e-5f, 49.0f, 0x1p-140f};

TEST_P(GivenScale, IsStoredAsItIsAndItsReciprocalMultiplies) {
  for (const std::string options : {":given", ":e5m2:given"})
    for (const DType dtype : kFloatTypes)
      for (const float scale : kScales) {
        const Input input({19, 70, 3}, dtype, Kind::normal, 3);
        const Matrix x = input;
        const QuantSpec spec = QuantSpec::parse("fp8_tensor" + options);
        const Quantized q = quantized(GetParam(), spec, x, {.scale = &scale});
        volatile float multiplier = 1.0f / scale;
        float amax = 0;
        for (int64_t i = 0; i < x.rows; ++i)
          for (int64_t j = 0; j < x.cols; ++j) {
            const float value = load_element(x.data, x.dtype, i * x.row_stride + j);
            const int code = encode(spec.element, value * multiplier);
            amax = std::max(amax, std::fabs(value));
            ASSERT_EQ(int{q.side(Direction::rowwise).data.as<uint8_t>()[i * 70 + j]}, code) << scale;
            ASSERT_EQ(int{q.side(Direction::columnwise).data.as<uint8_t>()[j * 19 + i]}, code) << scale;
          }
        for (const Direction d : {Direction::rowwise, Direction::columnwise}) {
          EXPECT_EQ(q.side(d).scale.as<uint32_t>()[0], std::bit_cast<uint32_t>(scale));
          EXPECT_EQ(q.side(d).amax.as<float>()[0], amax);
        }
      }
}

TEST_P(GivenScale, LargerElementsSaturate) {
  const Array<float> values{1e30f, -1e30f, 2.0f, std::numeric_limits<float>::infinity()};
  const float scale = 0.25f;
  const Matrix x{values.data(), DType::f32, 1, 4, 4};
  const Quantized q = quantized(GetParam(), QuantSpec::parse("fp8_tensor:given"), x, {.scale = &scale});
  EXPECT_EQ(dequantized(GetParam(), q, Direction::rowwise), (std::vector<float>{112, -112, 2, 112}));
  const Quantized lost = quantized(GetParam(), QuantSpec::parse("fp8_tensor:given:nan"), x, {.scale = &scale});
  EXPECT_TRUE(std::isnan(lost.side(Direction::rowwise).scale.as<float>()[0])) << "an amax of Inf";
}

TEST_P(GivenScale, UnderNvfp4ItIsTheAmaxOrTheGlobalScale) {
  for (const std::string options : {"", ":16x16", ":4over6=mae", ":4over6=mse:256", ":sr", ":nan"})
    for (size_t kind = 0; kind < kKindNames.size(); ++kind)
      for (const float amax : {0.7f, 37.0f}) {
        SCOPED_TRACE(text(options, " of ", kKindNames[kind], " under ", amax));
        const Input x({35, 150, 1}, DType::bf16, static_cast<Kind>(kind), 29);
        const std::array<bool, 2> rowwise{true, false};
        const float most = options.ends_with(":256") ? 1536.0f : 2688.0f, divisor = most / amax, factor = amax / most;
        for (const auto& [global, scale] :
             {std::pair(std::string(), amax), std::pair(std::string(":global=div"), divisor),
              std::pair(std::string(":global=mul"), factor)}) {
          const std::string base = "nvfp4" + options + global;
          const Quantized e = quantized(reference_runner(), QuantSpec::parse(base), x,
                                        {.directions = rowwise, .random = {.seed = 3}, .amax = amax}),
                          g = quantized(GetParam(), QuantSpec::parse(base + ":given"), x,
                                        {.directions = rowwise, .random = {.seed = 3}, .scale = &scale});
          const auto &expected = e.side(Direction::rowwise), &got = g.side(Direction::rowwise);
          EXPECT_EQ(difference(expected.amax, got.amax), "") << base;
          EXPECT_EQ(difference(expected.scale, got.scale), "") << base;
          EXPECT_EQ(difference(expected.data, got.data), "") << base;
        }
      }
}

TEST_P(GivenScale, OfAFileIsStoredAsItIs) {
  const Input x({5, 64}, DType::f32, Kind::normal, 9);
  for (const std::string spec : {"nvfp4:global=mul:given", "nvfp4:global=div:given"})
    for (const float scale : kScales) {
      const Quantized q = quantized(GetParam(), QuantSpec::parse(spec), x, {.scale = &scale});
      for (const Direction d : {Direction::rowwise, Direction::columnwise})
        EXPECT_EQ(q.side(d).amax.as<uint32_t>()[0], std::bit_cast<uint32_t>(scale)) << spec;
    }
}

std::string refused(std::string_view spec, const float* scale) {
  const float x[32] = {};
  Quantized q(QuantSpec::parse(spec), 1, 32, {true, false});
  try {
    quantize({.spec = q.spec,
              .x = {x, DType::f32, 1, 32, 32},
              .rowwise = q.view(Direction::rowwise),
              .columnwise = {},
              .random = {},
              .scale = scale});
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

TEST(GivenScale, MustBePositiveAndFinite) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const std::string_view spec : {"fp8_tensor:given", "nvfp4:given", "nvfp4:global=div:given"}) {
    for (const float wrong : {0.0f, -1.0f, kInfinity, std::numeric_limits<float>::quiet_NaN()})
      EXPECT_NE(refused(spec, &wrong).find("must be positive and finite; got "), std::string::npos) << wrong;
    EXPECT_NE(refused(spec, nullptr).find("has its scale from the caller, and there is none"), std::string::npos);
    const float right = 1;
    EXPECT_EQ(refused(spec, &right), "accepted");
  }
  const float scale = 1;
  EXPECT_NE(refused("nvfp4", &scale), "accepted");
}

}  // namespace
}  // namespace quire::testing
