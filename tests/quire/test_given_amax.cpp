// NVFP4 under a calibrated amax (numerics.md 5.9): what it gives where the tensor's own would be the same, where
// elements are larger, fused into an activation, and what is refused.
#include <algorithm>
#include <limits>

#include "inputs.h"
#include "produced.h"
#include "quantized.h"
#include "quire/format/codec.h"

namespace quire::testing {
namespace {

constexpr std::array<bool, 2> kRowwise{true, false};

class GivenAmax : public EveryRunner {};
QUIRE_FOR_EVERY_RUNNER(GivenAmax);

/// x with more rows below it, which hold nothing but one element.
Input with_an_outlier(const InputShape& shape, DType dtype, uint64_t seed, float outlier) {
  Input all({shape.rows + 16, shape.cols, shape.padding}, dtype, Kind::normal, seed);
  const Matrix m = all;
  for (int64_t r = shape.rows; r < m.rows; ++r)
    for (int64_t c = 0; c < m.cols; ++c)
      store_element(const_cast<void*>(m.data), dtype, r * m.row_stride + c, r + 1 == m.rows && c == 2 ? outlier : 0.0f);
  return all;
}

TEST_P(GivenAmax, GivesTheBytesThatATensorWithThatAmaxHas) {
  for (const std::string_view text : {"nvfp4", "nvfp4:16x16", "nvfp4:4over6=mae", "nvfp4:4over6=mse:256"})
    for (const DType dtype : kFloatTypes)
      for (const InputShape& shape : {InputShape{16, 48}, InputShape{48, 333, 3}, InputShape{160, 1040}}) {
        SCOPED_TRACE(quire::text(text, " ", name(dtype), " ", shape.rows, " x ", shape.cols));
        const QuantSpec spec = QuantSpec::parse(text);
        const float amax = 37;
        const Input all = with_an_outlier(shape, dtype, 3, -amax);
        Matrix part = all;
        part.rows = shape.rows;
        const Quantized expected = quantized(reference_runner(), spec, all, {.directions = kRowwise});
        const Quantized got = quantized(GetParam(), spec, part, {.directions = kRowwise, .amax = amax});
        const auto &e = expected.side(Direction::rowwise), &g = got.side(Direction::rowwise);
        EXPECT_EQ(g.amax.as<float>()[0], amax);
        EXPECT_EQ(difference(e.data.data(), g.data.data(), g.data.size()), "");
        EXPECT_EQ(difference(e.scale.data(), g.scale.data(), g.scale.size()), "");
      }
}

TEST_P(GivenAmax, LargerElementsSaturateAtIt) {
  const QuantSpec spec = QuantSpec::parse("nvfp4");
  const float amax = 2.5f;
  Input x({3, 64}, DType::f32, Kind::normal, 5);
  auto* values = static_cast<float*>(const_cast<void*>(static_cast<const Matrix&>(x).data));
  std::fill_n(values, 3 * 64, 0.0f);
  values[0] = 100, values[17] = -1e30f, values[40] = std::numeric_limits<float>::infinity(), values[64] = 2.5f;
  const Quantized q = quantized(GetParam(), spec, x, {.directions = kRowwise, .amax = amax});
  const auto* scale = q.side(Direction::rowwise).scale.as<uint8_t>();
  EXPECT_EQ(std::vector<uint8_t>(scale, scale + 5),
            (std::vector<uint8_t>{0x7E, 0x7E, 0x7E, 0, 0x7E}));  // 448, and 0 for zeros
  const std::vector<float> y = dequantized(reference_runner(), q, Direction::rowwise);
  EXPECT_FLOAT_EQ(y[0], amax);
  EXPECT_FLOAT_EQ(y[17], -amax);
  EXPECT_FLOAT_EQ(y[40], amax);
  EXPECT_FLOAT_EQ(y[64], amax);
}

TEST_P(GivenAmax, AnyInputGivesTheReferencesBytes) {
  for (size_t kind = 0; kind < kKindNames.size(); ++kind)
    for (const DType dtype : kFloatTypes)
      for (const float amax : {1e-40f, 0.7f, 3e38f}) {
        SCOPED_TRACE(text(kKindNames[kind], " ", name(dtype), " under ", amax));
        const Input x({19, 200, 1}, dtype, static_cast<Kind>(kind), 11);
        const QuantizeOptions options{.directions = kRowwise, .amax = amax};
        const Quantized e = quantized(reference_runner(), QuantSpec::parse("nvfp4"), x, options),
                        g = quantized(GetParam(), QuantSpec::parse("nvfp4"), x, options);
        EXPECT_EQ(difference(e.side(Direction::rowwise).data, g.side(Direction::rowwise).data), "");
        EXPECT_EQ(difference(e.side(Direction::rowwise).scale, g.side(Direction::rowwise).scale), "");
      }
}

TEST_P(GivenAmax, AnActivationThatQuantizesGivesTheBytesOfItsResult) {
  const QuantSpec spec = QuantSpec::parse("nvfp4");
  const Activation f = Activation::parse("swiglu");
  for (const int64_t rows : {1, 16, 37})
    for (const bool y_too : {false, true}) {
      const Input x({rows, 2 * 200}, DType::bf16, Kind::normal, 7);
      const auto run = [&](const Destination& to) { GetParam().run.activation({.activation = f, .x = x, .out = to}); };
      const Produced y = produced(rows, 200, DType::bf16, {}, run);
      const Produced got =
          produced(rows, 200, DType::bf16, {.y = y_too, .spec = spec, .directions = kRowwise, .amax = 1.5f}, run);
      const Quantized expected = quantized(reference_runner(), spec, {y.y.data(), DType::bf16, rows, 200, 200},
                                           {.directions = kRowwise, .amax = 1.5f});
      const auto &e = expected.side(Direction::rowwise), &g = got.quantized->side(Direction::rowwise);
      EXPECT_EQ(difference(e.data, g.data), "");
      EXPECT_EQ(difference(e.scale, g.scale), "");
      EXPECT_EQ(g.amax.as<float>()[0], 1.5f);
      if (y_too) {
        EXPECT_EQ(difference(y.y, got.y), "");
      }
    }
}

/// Every spec whose scales follow from more than blocks.
constexpr std::array<std::string_view, 10> kWithAmaxes{
    "fp8_tensor",  "fp8_tensor:e5m2", "fp8_tensor:pow2", "fp8_row",          "nvfp4",
    "nvfp4:16x16", "nvfp4:rht",       "nvfp4:rht:sr",    "nvfp4:row_scaled", "nvfp4:4over6=mae"};

class AmaxStep : public EveryRunner {};
QUIRE_FOR_EVERY_RUNNER(AmaxStep);

/// Amaxes as the step of its own measures them.
std::array<Array<float>, 2> measured(const Runner& runner, const QuantSpec& spec, const Matrix& x) {
  std::array<Array<float>, 2> found{Array<float>(static_cast<size_t>(amax_count(spec, x.rows))),
                                    Array<float>(static_cast<size_t>(amax_count(spec, x.cols)))};
  runner.run.amax({.spec = spec, .x = x, .rowwise = found[0].data(), .columnwise = found[1].data()});
  return found;
}

TEST_P(AmaxStep, GivenBackItLeavesEveryByteAsItWas) {
  for (const std::string_view text : kWithAmaxes)
    for (const Kind kind : {Kind::normal, Kind::zeros, Kind::special})
      for (const InputShape& shape : {InputShape{1, 16}, InputShape{37, 200, 3}, InputShape{144, 1040}}) {
        SCOPED_TRACE(quire::text(text, " ", kKindNames[static_cast<size_t>(kind)], " ", shape.rows, " x ", shape.cols));
        const QuantSpec spec = QuantSpec::parse(text);
        const Input x(shape, DType::bf16, kind, 3);
        const Quantized expected = quantized(reference_runner(), spec, x, {});
        const auto [rows, columns] = measured(GetParam(), spec, x);
        Quantized got(spec, shape.rows, shape.cols);
        GetParam().run.quantize({.spec = spec,
                                 .x = x,
                                 .rowwise = got.view(Direction::rowwise),
                                 .columnwise = got.view(Direction::columnwise),
                                 .random = {},
                                 .amax = {.rowwise = rows.data(), .columnwise = columns.data()}});
        for (const Direction d : {Direction::rowwise, Direction::columnwise}) {
          EXPECT_EQ(difference(expected.side(d).data, got.side(d).data), "");
          EXPECT_EQ(difference(expected.side(d).scale, got.side(d).scale), "");
          EXPECT_EQ(difference(expected.side(d).amax, got.side(d).amax), "");
        }
      }
}

TEST_P(AmaxStep, HalvesUnderTheLargestOfTheirAmaxesHaveTheBytesOfTheWhole) {
  for (const std::string_view text : {"fp8_tensor", "nvfp4", "nvfp4:16x16", "nvfp4:rht"}) {
    SCOPED_TRACE(text);
    const QuantSpec spec = QuantSpec::parse(text);
    const Input all({64, 96}, DType::f32, Kind::normal, 9);
    const Quantized whole = quantized(reference_runner(), spec, all, {});
    std::array<Matrix, 2> half{all, all};
    half[0].rows = half[1].rows = 32;
    half[1].data = static_cast<const float*>(half[1].data) + 32 * half[1].row_stride;
    Array<float> largest(2);
    for (const Matrix& part : half) {
      const auto found = measured(GetParam(), spec, part);
      for (size_t d = 0; d < 2; ++d) largest[d] = std::max(largest[d], found[d][0]);
    }
    for (size_t i = 0; i < 2; ++i) {
      Quantized got(spec, 32, 96);
      GetParam().run.quantize({.spec = spec,
                               .x = half[i],
                               .rowwise = got.view(Direction::rowwise),
                               .columnwise = got.view(Direction::columnwise),
                               .random = {},
                               .amax = {.rowwise = &largest[0], .columnwise = &largest[1]}});
      const auto &e = whole.side(Direction::rowwise), &g = got.side(Direction::rowwise);
      EXPECT_EQ(
          difference(e.data.as<uint8_t>() + static_cast<int64_t>(i) * g.data.size(), g.data.data(), g.data.size()), "")
          << i;
      EXPECT_EQ(difference(whole.side(Direction::columnwise).amax, got.side(Direction::columnwise).amax), "") << i;
    }
  }
}

TEST(GivenAmaxErrors, WhatCannotBeOneIsRefused) {
  const Input x({16, 48}, DType::bf16, Kind::normal, 1);
  const auto refused = [&](std::string_view spec, float amax,
                           std::array<bool, 2> directions = kRowwise) -> std::string {
    Quantized q(QuantSpec::parse(spec), 16, 48, directions);
    try {
      quantize({.spec = q.spec,
                .x = x,
                .rowwise = q.view(Direction::rowwise),
                .columnwise = q.view(Direction::columnwise),
                .random = {},
                .amax = {.rowwise = &amax}});
    } catch (const Error& e) {
      return e.what();
    }
    return "accepted";
  };
  EXPECT_EQ(refused("nvfp4", 1), "accepted");
  for (const std::string_view spec : {"mxfp8", "mxfp4", "fp8_block"})
    EXPECT_EQ(refused(spec, 1), text("quantize: scales of ", spec, " follow from blocks alone, so there is no amax; ",
                                     "leave it out, or use fp8_tensor, fp8_row or nvfp4"));
  for (const float amax : {-1.0f, std::numeric_limits<float>::quiet_NaN()})
    EXPECT_NE(refused("nvfp4", amax).find("a given amax must not be negative or NaN; got "), std::string::npos) << amax;
}

}  // namespace
}  // namespace quire::testing
