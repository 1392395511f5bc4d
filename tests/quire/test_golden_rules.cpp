// The rules that kernels are made of against the golden vectors: casts, scales, random bits, the transform, the swizzle
// and the delayed update.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "golden_cases.h"
#include "quire/base/check.h"
#include "quire/format/codec.h"
#include "quire/format/element.h"
#include "quire/format/fast.h"
#include "quire/format/pack.h"
#include "quire/spec/delayed.h"
#include "quire/spec/hadamard.h"
#include "quire/spec/random.h"
#include "quire/spec/scale.h"
#include "quire/spec/swizzle.h"

namespace quire::testing {
namespace {

uint32_t bits(float x) { return std::bit_cast<uint32_t>(x); }

const golden::Case& case_of(std::string_view id) {
  for (const golden::Case& c : golden_pack().cases)
    if (c.id == id) return c;
  fail("no golden case ", id);
}

/// Both encoders of a format on every input of a cast case.
template <Format F>
void expect_encodes(const golden::Case& c, const std::string& tensor, const std::vector<float>& inputs) {
  ASSERT_EQ(c.at(tensor).numel(), static_cast<int64_t>(inputs.size()));
  const auto* expected = c.data<uint8_t>(tensor);
  for (size_t i = 0; i < inputs.size(); ++i) {
    ASSERT_EQ(int{expected[i]}, encode(F, inputs[i])) << tensor << " of " << inputs[i];
    ASSERT_EQ(int{expected[i]}, int{encode_fast<F>(inputs[i])}) << tensor << " of " << inputs[i];
  }
}

void expect_all_encode(const golden::Case& c, const std::vector<float>& inputs) {
  expect_encodes<Format::e4m3>(c, "e4m3", inputs);
  expect_encodes<Format::e5m2>(c, "e5m2", inputs);
  expect_encodes<Format::e2m1>(c, "e2m1", inputs);
}

TEST(GoldenRules, EveryGoldenCaseOfCastsIsKnownHere) { golden_group("casts", 34); }

TEST(GoldenRules, EncodersGiveTheGoldenCodesOfEveryBf16) {
  std::vector<float> inputs;
  for (uint32_t i = 0; i < 65536; ++i) inputs.push_back(bf16_to_f32(static_cast<uint16_t>(i)));
  expect_all_encode(case_of("casts/bf16_all"), inputs);
}

TEST(GoldenRules, EncodersGiveTheGoldenCodesOfHardFloats) {
  const golden::Case& c = case_of("casts/f32_hard");
  expect_all_encode(c, {c.data<float>("x"), c.data<float>("x") + c.at("x").numel()});
}

template <Format F>
void expect_decodes(const golden::Case& c, const std::string& tensor) {
  for (int code = 0; code < row(F).codes(); ++code) {
    const float expected = c.data<float>(tensor)[code];
    for (const float actual : {decode(F, code), decode_fast<F>(static_cast<uint32_t>(code))})
      ASSERT_TRUE(bits(expected) == bits(actual) || (expected != expected && actual != actual))
          << tensor << " " << code;
  }
}

TEST(GoldenRules, DecodersGiveTheGoldenValues) {
  const golden::Case& c = case_of("casts/decode");
  expect_decodes<Format::e4m3>(c, "e4m3");
  expect_decodes<Format::e5m2>(c, "e5m2");
  expect_decodes<Format::e2m1>(c, "e2m1");
}

TEST(GoldenRules, E8m0RoundsUpAsTheGoldenBytesDo) {
  const golden::Case& c = case_of("casts/e8m0");
  for (int64_t i = 0; i < c.at("v").numel(); ++i) {
    const float v = c.data<float>("v")[i];
    ASSERT_EQ(int{c.data<uint8_t>("byte")[i]}, int{e8m0_up(v)}) << v;
    ASSERT_EQ(int{c.data<uint8_t>("byte_from_amax_e4m3")[i]}, int{e8m0_scale(v, Format::e4m3)}) << v;
    ASSERT_EQ(int{c.data<uint8_t>("byte_from_amax_e5m2")[i]}, int{e8m0_scale(v, Format::e5m2)}) << v;
  }
}

TEST(GoldenRules, E8m0MultipliersAreTheGoldenOnes) {
  const golden::Case& c = case_of("casts/e8m0_multipliers");
  for (int i = 0; i < 255; ++i) {
    EXPECT_EQ(bits(c.data<float>("quantize_multiplier")[i]), bits(e8m0_multiplier(static_cast<uint8_t>(i)))) << i;
    EXPECT_EQ(bits(c.data<float>("dequantize_multiplier")[i]), bits(e8m0_value(static_cast<uint8_t>(i)))) << i;
  }
  EXPECT_TRUE(std::isnan(e8m0_multiplier(255)) && std::isnan(e8m0_value(255)));
}

TEST(GoldenRules, ScalesFromAmaxesAreTheGoldenOnes) {
  size_t tables = 0;
  for (const golden::Case& c : golden_pack().cases) {
    if (field(c, "kind") != "scale_from_amax") continue;
    SCOPED_TRACE(c.id);
    const std::string dtype = field(c, "value_for_inf");
    const float infinite = largest_finite(dtype == "f32" ? DType::f32 : dtype == "f16" ? DType::f16 : DType::bf16);
    const QuantSpec spec{.family = Family::fp8_block,
                         .element = field(c, "elem") == "e5m2" ? Format::e5m2 : Format::e4m3,
                         .pow2 = flag(c, "pow2"),
                         .epsilon = std::stof(field(c, "eps"))};
    for (int64_t i = 0; i < c.at("amax").numel(); ++i) {
      const float amax = c.data<float>("amax")[i];
      ASSERT_EQ(bits(c.data<float>("scale")[i]), bits(scale_from_amax(amax, spec, infinite))) << amax;
    }
    ++tables;
  }
  EXPECT_EQ(tables, 24u);
}

TEST(GoldenRules, GlobalScalesOfNvfp4AreTheGoldenOnes) {
  for (const float most : {448.0f, 256.0f}) {
    const golden::Case& c = case_of(most == 448.0f ? "casts/nvfp4_global_448" : "casts/nvfp4_global_256");
    for (int64_t i = 0; i < c.at("g").numel(); ++i) {
      const float amax = c.data<float>("g")[i];
      const GlobalScale g = global_scale(amax, most);
      ASSERT_EQ(bits(c.data<float>("s_enc")[i]), bits(g.encode)) << amax;
      ASSERT_EQ(bits(c.data<float>("s_dec")[i]), bits(g.decode)) << amax;
      ASSERT_EQ(bits(c.data<float>("mult")[i]), bits(g.block_mult)) << amax;
    }
  }
}

TEST(GoldenRules, ConstantsOfDecodingAndOfProductsAreThoseOfTheContract) {
  EXPECT_EQ(bits(nvfp4_value(1, 1, 448)), 0x39C30C31u);
  for (const golden::Case& c : golden_pack().cases) {
    if (field(c, "kind") != "nvfp4_gemm_alpha") continue;
    SCOPED_TRACE(c.id);
    const float constant = 1.0f / (36.0f * std::stof(field(c, "e4m3_max_a")) * std::stof(field(c, "e4m3_max_b")));
    for (int64_t i = 0; i < c.at("alpha").numel(); ++i) {
      const float a = c.data<float>("amax_a")[i], b = c.data<float>("amax_b")[i];
      EXPECT_EQ(bits(c.data<float>("alpha")[i]), bits(1.0f * a * b * constant)) << a << " " << b;
    }
  }
}

TEST(GoldenRules, PhiloxDrawsTheGoldenWords) {
  size_t draws = 0;
  for (const golden::Case* c : golden_group("random", 8)) {
    if (field(*c, "kind") != "philox4x32_10") continue;
    const auto words =
        philox(unsigned_field(*c, "seed"), unsigned_field(*c, "offset"), unsigned_field(*c, "subsequence"));
    for (size_t j = 0; j < 4; ++j) EXPECT_EQ(c->data<uint32_t>("words")[j], words[j]) << c->id;
    ++draws;
  }
  EXPECT_EQ(draws, 7u);
}

TEST(GoldenRules, DrawsOfBlocksAndTheirBytesAreTheGoldenOnes) {
  size_t cases = 0;
  for (const golden::Case* c : golden_group("sr_mapping", 18)) {
    if (field(*c, "kind") != "sr_words") continue;
    for (int64_t i = 0; i < c->at("block").numel(); ++i) {
      const auto words =
          philox(unsigned_field(*c, "seed"), unsigned_field(*c, "offset"), c->data<uint64_t>("block")[i]);
      for (size_t j = 0; j < 4; ++j) EXPECT_EQ(c->data<uint32_t>("words")[i * 4 + static_cast<int64_t>(j)], words[j]);
      for (int j = 0; j < 16; ++j) EXPECT_EQ(int{c->data<uint8_t>("bytes")[i * 16 + j]}, int{random_byte(words, j)});
    }
    ++cases;
  }
  EXPECT_EQ(cases, 8u);
}

TEST(GoldenRules, StochasticCastGivesTheGoldenCodeForEveryRandomByte) {
  const golden::Case& c = case_of("random/sr_e2m1");
  const int64_t n = c.at("x").numel();
  for (int64_t random = 0; random < 256; ++random)
    for (int64_t i = 0; i < n; ++i) {
      const float x = c.data<float>("x")[i];
      ASSERT_EQ(int{c.data<uint8_t>("codes")[random * n + i]}, int{encode_stochastic(x, static_cast<uint8_t>(random))})
          << x << " with byte " << random;
    }
}

/// Packed stochastic codes of values [outer, contraction] under the golden scales and the golden random bytes.
void expect_stochastic_codes(const golden::Case& c, const std::vector<float>& values, const std::string& direction) {
  const std::string suffix = c.has("codes_col_sr") ? "_sr" : "";
  const auto *codes = c.data<uint8_t>("codes_" + direction + suffix), *random = c.data<uint8_t>("random_bytes");
  const auto* scales = c.data<uint8_t>("scale_" + direction + suffix);
  const GlobalScale g = global_scale(c.data<float>("amax_" + direction)[0], 448);
  for (size_t i = 0; i < values.size(); ++i) {
    const float scaled = values[i] * nvfp4_multiplier(decode(Format::e4m3, scales[i / 16]), g);
    ASSERT_EQ(unpack(codes, static_cast<int64_t>(i)), unsigned{encode_stochastic(scaled, random[i])}) << i;
  }
}

TEST(GoldenRules, StochasticNvfp4GivesTheGoldenCodesUnderTheGoldenBytes) {
  size_t cases = 0;
  for (const golden::Case* c : golden_group("nvfp4", 144)) {
    if (!flag(*c, "sr")) continue;
    SCOPED_TRACE(c->id);
    const Matrix x = input(*c);
    std::vector<float> values;
    for (int64_t i = 0; i < x.rows * x.cols; ++i) values.push_back(load_element(x.data, x.dtype, i));
    expect_stochastic_codes(*c, values, "row");
    ++cases;
  }
  EXPECT_EQ(cases, 26u);
}

void expect_transforms(const golden::Case& c) {
  SCOPED_TRACE(c.id);
  const Matrix x = input(c);
  const auto* expected = c.data<uint16_t>("rht_bf16");
  for (int64_t k = 0; k < x.cols; ++k)
    for (int64_t m = 0; m < x.rows; m += 16) {
      float group[16];
      for (int64_t i = 0; i < 16; ++i) group[i] = load_element(x.data, x.dtype, (m + i) * x.cols + k);
      hadamard16(group, field(c, "sign_mask") != "0x0000");
      for (int64_t i = 0; i < 16; ++i)
        ASSERT_EQ(expected[k * x.rows + m + i], f32_to_bf16(group[i])) << "column " << k << ", token " << m + i;
    }
}

TEST(GoldenRules, HadamardTransformGivesTheGoldenValuesAndStochasticCodes) {
  for (const golden::Case* c : golden_group("nvfp4_rht", 34)) {
    expect_transforms(*c);
    std::vector<float> values;
    for (int64_t i = 0; i < c->at("rht_bf16").numel(); ++i)
      values.push_back(bf16_to_f32(c->data<uint16_t>("rht_bf16")[i]));
    expect_stochastic_codes(*c, values, "col");
  }
  for (const golden::Case* c : golden_group("rht_butterfly", 24)) expect_transforms(*c);
}

TEST(GoldenRules, SwizzleMovesEveryScaleWhereTheGoldenBytesHaveItAndPadsWithZeros) {
  for (const golden::Case* c : golden_group("swizzle", 7)) {
    SCOPED_TRACE(c->id);
    const int64_t rows = c->at("scale").shape[0], cols = c->at("scale").shape[1];
    std::vector<uint8_t> out(static_cast<size_t>(round_up(rows, kSwizzleRows) * round_up(cols, kSwizzleCols)));
    ASSERT_EQ(static_cast<int64_t>(out.size()), c->at("swizzled").numel());
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < cols; ++j)
        out[static_cast<size_t>(swizzled_offset(i, j, cols))] = c->data<uint8_t>("scale")[i * cols + j];
    EXPECT_EQ(0, std::memcmp(out.data(), c->data<uint8_t>("swizzled"), out.size()));
  }
}

TEST(GoldenRules, DelayedUpdatesGiveTheGoldenHistoriesAndScales) {
  for (const golden::Case* c : golden_group("delayed", 60)) {
    SCOPED_TRACE(c->id);
    const int64_t length = c->num("history_len"), steps = c->at("step_amax").shape[0],
                  slots = c->at("step_amax").shape[1];
    const DelayedRule rule{.algorithm = field(*c, "algo") == "max" ? AmaxAlgorithm::max : AmaxAlgorithm::most_recent,
                           .largest = std::stof(field(*c, "fp8_max")),
                           .margin = static_cast<int>(c->num("margin"))};
    std::vector<float> history(static_cast<size_t>(length * slots)), scale(static_cast<size_t>(slots), 1.0f);
    for (int64_t step = 0; step < steps; ++step)
      for (int64_t slot = 0; slot < slots; ++slot) {
        const AmaxHistory column{&history[static_cast<size_t>(slot)], length, slots};
        column[0] = std::fmax(column[0], c->data<float>("step_amax")[step * slots + slot]);
        const float reduced = flag(*c, "reduced") ? c->data<float>("reduced_amax")[step * slots + slot] : column[0];
        float& s = scale[static_cast<size_t>(slot)];
        s = delayed_update(rule, column, reduced, s);
        ASSERT_EQ(bits(c->data<float>("scale_after")[step * slots + slot]), bits(s))
            << "step " << step << ", slot " << slot;
        for (int64_t i = 0; i < length; ++i)
          ASSERT_EQ(bits(c->data<float>("history_after")[(step * length + i) * slots + slot]), bits(column[i]))
              << "step " << step << ", slot " << slot << ", row " << i;
      }
  }
}

}  // namespace
}  // namespace quire::testing
