// NVFP4 under the global scale of a file (numerics.md 5.11): what codes mean, bit for bit, and what quantization
// stores.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "inputs.h"
#include "quantized.h"
#include "quire/format/codec.h"
#include "quire/format/element.h"
#include "random_operand.h"

namespace quire::testing {
namespace {

class GlobalScaleOption : public EveryRunner {};
QUIRE_FOR_EVERY_RUNNER(GlobalScaleOption);

/// The value of an E4M3 byte out of its fields.
float e4m3(int byte) {
  const int exponent = byte >> 3 & 15, fraction = byte & 7;
  if ((byte & 0x7F) == 0x7F) return std::numeric_limits<float>::quiet_NaN();
  const float magnitude = exponent ? std::ldexp(1.0f + static_cast<float>(fraction) / 8, exponent - 7)
                                   : std::ldexp(static_cast<float>(fraction), -9);
  return byte & 0x80 ? -magnitude : magnitude;
}

float e2m1(int code) {
  constexpr float kMagnitudes[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  return code & 8 ? -kMagnitudes[code & 7] : kMagnitudes[code & 7];
}

/// Whether two numbers have the same bits, or are both NaN.
::testing::AssertionResult same(float got, float expected) {
  if (std::isnan(expected) ? std::isnan(got) : std::bit_cast<uint32_t>(got) == std::bit_cast<uint32_t>(expected))
    return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << std::hexfloat << got << " instead of " << expected;
}

/// Numbers as files have them, where 2688 loses some, whose reciprocals do not come back, and at the ends of float32.
std::vector<float> globals() {
  std::vector<float> found{1.0f, 0x1p-149f, 0x1p-126f, 0x1.FFFFFEp127f, 2688.0f, 1.0f / 2688, 0.1f, 3.0f};
  Random r(17);
  while (found.size() < 40) {
    const float g = std::ldexp(static_cast<float>(1 + r.uniform()), static_cast<int>(r.below(40)) - 30);
    const bool lossy = found.size() % 2 ? g * 2688.0f / 2688.0f != g : 1.0f / (1.0f / g) != g;
    if (lossy) found.push_back(g);
  }
  return found;
}

/// A line for each byte of a block scale, and in it every code.
Quantized every_code(const std::string& options, float g) {
  Quantized q(QuantSpec::parse("nvfp4" + options), 256, 16);
  QuantizedSide& side = q.side(Direction::rowwise);
  for (int64_t o = 0; o < 256; ++o) {
    side.scale.as<uint8_t>()[o] = static_cast<uint8_t>(o);
    for (int i = 0; i < 8; ++i) side.data.as<uint8_t>()[o * 8 + i] = static_cast<uint8_t>(2 * i | (2 * i + 1) << 4);
  }
  for (int64_t i = 0; i < side.amax.size() / 4; ++i) side.amax.as<float>()[i] = g;
  return q;
}

TEST_P(GlobalScaleOption, EveryCodeUnderEveryBlockScaleHasTheValueOfTheFormula) {
  for (const float g : globals()) {
    const std::vector<float> mul = dequantized(GetParam(), every_code(":global=mul", g), Direction::rowwise),
                             div = dequantized(GetParam(), every_code(":row_scaled:global=div", g), Direction::rowwise);
    for (int o = 0; o < 256; ++o)
      for (int l = 0; l < 16; ++l) {
        volatile float times = e4m3(o) * g, over = e4m3(o) / g;  // rounded to float32 each
        ASSERT_TRUE(same(mul[static_cast<size_t>(o * 16 + l)], e2m1(l) * times)) << "mul " << g << ' ' << o << ' ' << l;
        ASSERT_TRUE(same(div[static_cast<size_t>(o * 16 + l)], e2m1(l) * over)) << "div " << g << ' ' << o << ' ' << l;
      }
  }
}

TEST_P(GlobalScaleOption, BothWaysAreRoundedOnceToSmallerTypes) {
  for (const DType dtype : {DType::bf16, DType::f16})
    for (const bool divides : {false, true})
      for (const float g : {0.0123f, 0.71f, 345.6f}) {
        const Quantized q = every_code(divides ? ":global=div" : ":global=mul", g);
        Guarded out(256 * 16 * 2);
        DequantizeProblem p = q.decoding(Direction::rowwise);
        p.out = {out.data(), dtype, 256, 16, 16};
        GetParam().run.dequantize(p);
        for (int i = 0; i < 256 * 16; ++i) {
          const float scale = divides ? e4m3(i / 16) / g : e4m3(i / 16) * g;
          uint32_t expected = 0;  // of which a smaller type takes the first bytes
          store_element(&expected, dtype, 0, e2m1(i % 16) * scale);
          ASSERT_TRUE(same(load_element(out.data(), dtype, i), load_element(&expected, dtype, 0))) << g << ' ' << i;
        }
      }
}

/// numerics.md 5.11 written out: the stored number, and the multiplier of a block from its byte.
struct Rule {
  float stored, encode, decode;

  Rule(float amax, bool divides, float most) {
    const float g = divides ? most / amax : amax / most;
    stored = amax == 0 ? 1 : divides ? std::min(g, 0x1.FFFFFEp127f) : g == 0 ? 1 : g;
    encode = divides ? stored : std::min(1 / stored, 0x1.FFFFFEp127f);
    decode = divides ? 1 / encode : stored;
    if (encode == 0) encode = decode = 1;
  }
  int byte(float block_amax) const {
    const float mult = encode * (1.0f / 6.0f);
    return quire::encode(Format::e4m3, std::min(block_amax * mult, 0x1.FFFFFEp127f));
  }
  float multiplier(int byte) const {
    const float d = e4m3(byte) * decode;
    return d == 0 ? 0x1.FFFFFEp127f : std::min(1 / d, 0x1.FFFFFEp127f);
  }
};

TEST_P(GlobalScaleOption, QuantizationStoresItAndFollowsFromIt) {
  const int64_t m = 19, k = 80;
  for (const std::string options : {":global=mul", ":global=div", ":row_scaled:global=mul", ":row_scaled:global=div"})
    for (const Kind kind : {Kind::normal, Kind::ties, Kind::wide, Kind::zeros}) {
      SCOPED_TRACE(options + " of " + std::string(kKindNames[static_cast<size_t>(kind)]));
      const Input input({m, k, 2}, DType::f32, kind, 23);
      const Matrix x = input;
      const QuantSpec spec = QuantSpec::parse("nvfp4" + options);
      const bool divides = spec.global == Global::divisor;
      const Quantized q = quantized(GetParam(), spec, x);
      const auto& side = q.side(Direction::rowwise);
      const auto at = [&](int64_t o, int64_t l) { return static_cast<const float*>(x.data)[o * x.row_stride + l]; };
      float amax = 0;
      for (int64_t o = 0; o < m; ++o)
        for (int64_t l = 0; l < k; ++l) amax = std::max(amax, std::fabs(at(o, l)));
      for (int64_t o = 0; o < m; ++o) {
        if (spec.row_scaled) amax = 0;
        for (int64_t l = 0; spec.row_scaled && l < k; ++l) amax = std::max(amax, std::fabs(at(o, l)));
        const Rule rule(amax, divides, 2688);
        ASSERT_TRUE(same(side.amax.as<float>()[spec.row_scaled ? o : 0], rule.stored)) << amax;
        for (int64_t b = 0; b < k / 16; ++b) {
          float block = 0;
          for (int64_t l = b * 16; l < b * 16 + 16; ++l) block = std::max(block, std::fabs(at(o, l)));
          const int byte = side.scale.as<uint8_t>()[o * (k / 16) + b];
          ASSERT_EQ(byte, rule.byte(block)) << o << ' ' << b;
          for (int64_t l = b * 16; l < b * 16 + 16; ++l) {
            const int code = side.data.as<uint8_t>()[(o * k + l) / 2] >> (l % 2 * 4) & 15;
            ASSERT_EQ(code, encode(Format::e2m1, at(o, l) * rule.multiplier(byte))) << o << ' ' << l;
          }
        }
      }
    }
}

TEST_P(GlobalScaleOption, DivisionHasTheCodesAndBlockScalesOfTheAmax) {
  for (const std::string options : {"", ":16x16", ":row_scaled", ":rht", ":sr", ":swizzled", ":nan"})
    for (size_t kind = 0; kind < kKindNames.size(); ++kind) {
      SCOPED_TRACE(options + " of " + std::string(kKindNames[kind]));
      const Input x({35, 150, 1}, DType::bf16, static_cast<Kind>(kind), 29);
      const QuantizeOptions drawn{.random = {.seed = 5}};
      const Quantized amax = quantized(GetParam(), QuantSpec::parse("nvfp4" + options), x, drawn),
                      div = quantized(GetParam(), QuantSpec::parse("nvfp4" + options + ":global=div"), x, drawn);
      for (const Direction d : {Direction::rowwise, Direction::columnwise}) {
        EXPECT_EQ(difference(amax.side(d).data, div.side(d).data), "");
        EXPECT_EQ(difference(amax.side(d).scale, div.side(d).scale), "");
      }
    }
}

TEST_P(GlobalScaleOption, TheBetterOfTwoBlockScalesIsChosenByTheDecodedValues) {
  const int64_t k = 16 * 64;
  for (const bool squared : {false, true})
    for (const bool divides : {false, true}) {
      const Input input({1, k}, DType::f32, Kind::normal, 31);
      const auto* x = static_cast<const float*>(static_cast<const Matrix&>(input).data);
      const std::string text = squared ? "nvfp4:4over6=mse" : "nvfp4:4over6=mae";
      const QuantSpec spec = QuantSpec::parse(text + (divides ? ":256:global=div" : ":256:global=mul"));
      const Quantized q = quantized(GetParam(), spec, input, {.directions = {true, false}});
      float amax = 0;
      for (int64_t l = 0; l < k; ++l) amax = std::max(amax, std::fabs(x[l]));
      const Rule rule(amax, divides, 6 * 256);
      int fours = 0;
      for (int64_t b = 0; b < k / 16; ++b) {
        float block = 0;
        for (int64_t l = b * 16; l < b * 16 + 16; ++l) block = std::max(block, std::fabs(x[l]));
        const float base = block / 6.0f * rule.encode;
        const int four = encode(Format::e4m3, std::min(base * 1.5f, 448.0f)),
                  six = encode(Format::e4m3, std::min(base, 448.0f));
        const auto error = [&](int byte) {
          const float scale = divides ? e4m3(byte) / rule.stored : e4m3(byte) * rule.stored;
          float sum = 0;
          for (int64_t l = b * 16; l < b * 16 + 16; ++l) {
            const float d = e2m1(encode(Format::e2m1, x[l] * rule.multiplier(byte))) * scale - x[l];
            sum += squared ? d * d : std::fabs(d);
          }
          return sum;
        };
        const bool is_four = error(four) < error(six);
        fours += is_four;
        ASSERT_EQ(q.side(Direction::rowwise).scale.as<uint8_t>()[b], is_four ? four : six) << b;
      }
      EXPECT_TRUE(fours > 5 && fours < 60) << fours;
    }
}

TEST_P(GlobalScaleOption, AGivenAmaxIsAnAmaxThatTheNumberFollowsFrom) {
  const Input x({3, 64}, DType::f32, Kind::normal, 5);
  for (const bool divides : {false, true}) {
    const QuantSpec spec = QuantSpec::parse(divides ? "nvfp4:global=div" : "nvfp4:global=mul");
    const Quantized q = quantized(GetParam(), spec, x, {.directions = {true, false}, .amax = 37.0f});
    EXPECT_EQ(q.side(Direction::rowwise).amax.as<float>()[0], divides ? 2688.0f / 37 : 37.0f / 2688);
  }
}

TEST_P(GlobalScaleOption, AnInfiniteAmaxIsStoredAsWhatItGives) {
  Input x({1, 32}, DType::f32, Kind::normal, 7);
  auto* values = static_cast<float*>(const_cast<void*>(static_cast<const Matrix&>(x).data));
  values[3] = std::numeric_limits<float>::infinity();
  for (const bool divides : {false, true}) {
    const QuantSpec spec = QuantSpec::parse(divides ? "nvfp4:global=div" : "nvfp4:global=mul");
    const Quantized q = quantized(GetParam(), spec, x, {.directions = {true, false}}),
                    plain = quantized(GetParam(), QuantSpec::parse("nvfp4"), x, {.directions = {true, false}});
    EXPECT_EQ(q.side(Direction::rowwise).amax.as<float>()[0], divides ? 0.0f : std::numeric_limits<float>::infinity());
    EXPECT_EQ(difference(plain.side(Direction::rowwise).data, q.side(Direction::rowwise).data), "");
    EXPECT_EQ(difference(plain.side(Direction::rowwise).scale, q.side(Direction::rowwise).scale), "");
    EXPECT_EQ(dequantized(GetParam(), q, Direction::rowwise)[3], std::numeric_limits<float>::infinity());
  }
}

/// Block scales and multipliers are 0 or NaN there, and infinities make NaN of them.
TEST_P(GlobalScaleOption, InfinitiesUnderNumbersAtTheEndsHaveTheBytesOfTheReference) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
    for (const std::string options : {"global=mul", "global=div", "16x16:global=mul", "16x16:global=div"})
      for (const float g : {1e36f, 0x1.FFFFFEp127f, 7.5e-37f, 1e-38f, 0x1p-149f}) {
        SCOPED_TRACE(text(options, " of ", g, " and dtype ", static_cast<int>(dtype)));
        const Input x({32, 256}, dtype, Kind::special, 11);
        const QuantSpec spec = QuantSpec::parse("nvfp4:given:" + options);
        const Quantized q = quantized(GetParam(), spec, x, {.scale = &g});
        const Quantized expected = quantized(reference_runner(), spec, x, {.scale = &g});
        for (const Direction d : {Direction::rowwise, Direction::columnwise}) {
          EXPECT_EQ(difference(expected.side(d).scale, q.side(d).scale), "");
          EXPECT_EQ(difference(expected.side(d).data, q.side(d).data), "");
        }
      }
}

}  // namespace
}  // namespace quire::testing
