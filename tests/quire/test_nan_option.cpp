// The option `nan` (numerics.md 1.9): what is not finite does not vanish, and nothing else changes.
#include <cmath>
#include <limits>
#include <set>

#include "inputs.h"
#include "quantized.h"
#include "specs.h"

namespace quire::testing {
namespace {

class NanOption : public EveryRunner {};
QUIRE_FOR_EVERY_RUNNER(NanOption);

constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInf = std::numeric_limits<float>::infinity();
constexpr int64_t kRows = 140, kCols = 272, kRow = 37, kCol = 203;
constexpr Randomness kRandom{.seed = 11, .rowwise_offset = 2, .columnwise_offset = 3};

std::vector<QuantSpec> specs_with_nan() {
  std::vector<QuantSpec> specs = plain_specs();
  std::erase_if(specs, [](const QuantSpec& spec) { return !spec.nan; });
  return specs;
}

QuantSpec without(QuantSpec spec) {
  spec.nan = false;
  return spec;
}

/// A normal matrix with one element of its own.
Input with_element(DType dtype, float element) {
  Input x({kRows, kCols}, dtype, Kind::normal, 5);
  const auto* at = static_cast<const char*>(Matrix(x).data) + (kRow * x.stride() + kCol) * size_of(dtype);
  store_element(const_cast<char*>(at), dtype, 0, element);
  return x;
}

/// Line after line.
std::vector<float> decoded(const Runner& runner, const Quantized& q, Direction d) {
  const Operand o = q.operand(d);
  std::vector<float> out(static_cast<size_t>(o.outer * o.contraction));
  DequantizeProblem p = q.decoding(d);
  p.out = {out.data(), DType::f32, o.outer, o.contraction, o.contraction};
  runner.run.dequantize(p);
  return out;
}

/// Whether the element at (row, col) shares a scale with the one that was set, as the families' table says.
bool shares(const QuantSpec& spec, Direction d, int64_t row, int64_t col) {
  const int64_t line = d == Direction::rowwise ? row : col, own = d == Direction::rowwise ? kRow : kCol;
  const int64_t along = d == Direction::rowwise ? col : row, own_along = d == Direction::rowwise ? kCol : kRow;
  if (spec.row().scope == Scope::tensor) return true;
  if (spec.row().scope == Scope::row) return line == own;
  const int64_t n = spec.row().block;
  return along / n == own_along / n && (spec.square ? line / n == own / n : line == own);
}

TEST_P(NanOption, BytesOfFiniteElementsAreThoseWithoutIt) {
  const Input x({kRows, kCols}, DType::bf16, Kind::outliers, 3);
  for (const QuantSpec& spec : specs_with_nan()) {
    const Quantized with = quantized(GetParam(), spec, x, {.random = kRandom}),
                    bare = quantized(GetParam(), without(spec), x, {.random = kRandom});
    for (const Direction d : {Direction::rowwise, Direction::columnwise}) {
      ASSERT_EQ(difference(bare.side(d).data, with.side(d).data), "") << spec;
      ASSERT_EQ(difference(bare.side(d).scale, with.side(d).scale), "") << spec;
      ASSERT_EQ(difference(bare.side(d).amax, with.side(d).amax), "") << spec;
    }
  }
}

/// Expects NaN where the scale covers the element, or in its own place if it has a code, and elsewhere what was there
/// without it. An Inf is in the amax above the blocks besides, and elements that are transformed have other
/// neighbours: then the others are not compared.
void expect_lost(const QuantSpec& spec, Direction d, float element, const std::vector<float>& found,
                 const std::vector<float>& expected) {
  const bool own_code = std::isnan(element) && spec.row().scope != Scope::block;
  const bool transformed = d == Direction::columnwise && spec.hadamard != Hadamard::off;
  const bool rest_is_finite = std::isnan(element) || !spec.row().has_amax;
  const int64_t length = d == Direction::rowwise ? kCols : columnwise_tokens(spec, kRows);
  for (size_t i = 0; i < found.size(); ++i) {
    const int64_t line = static_cast<int64_t>(i) / length, along = static_cast<int64_t>(i) % length;
    const int64_t r = d == Direction::rowwise ? line : along, c = d == Direction::rowwise ? along : line;
    const bool lost = own_code ? r == kRow && c == kCol : shares(spec, d, r, c);
    if (lost || rest_is_finite) {
      ASSERT_EQ(std::isnan(found[i]), lost) << r << ", " << c;
    }
    if (!lost && rest_is_finite && !transformed) {
      ASSERT_EQ(found[i], expected[i]) << r << ", " << c;
    }
  }
}

TEST_P(NanOption, WhatIsNotFiniteDoesNotVanish) {
  size_t turn = 0;
  for (const QuantSpec& spec : specs_with_nan())
    for (const float element : {kNan, -kNan, kInf, -kInf}) {
      const DType dtype = kFloatTypes[turn++ % kFloatTypes.size()];
      const Quantized q = quantized(GetParam(), spec, with_element(dtype, element), {.random = kRandom}),
                      finite = quantized(GetParam(), spec, with_element(dtype, 0), {.random = kRandom});
      SCOPED_TRACE(text(spec, " of ", element));
      for (const Direction d : {Direction::rowwise, Direction::columnwise}) {
        expect_lost(spec, d, element, decoded(GetParam(), q, d), decoded(GetParam(), finite, d));
        if (HasFatalFailure()) return;
      }
    }
}

TEST_P(NanOption, AnInfUnderAGivenScaleIsSeen) {
  const float scale = 2;
  for (const std::string_view name : {"fp8_tensor:nan", "fp8_tensor:e5m2:nan"}) {
    const QuantSpec spec = QuantSpec::parse(name);
    for (const float element : {1.0f, kInf}) {
      const Quantized q = quantized(GetParam(), spec, with_element(DType::f32, element), {.scale = &scale});
      for (const Direction d : {Direction::rowwise, Direction::columnwise})
        for (const float value : decoded(GetParam(), q, d)) ASSERT_EQ(std::isnan(value), element == kInf) << name;
    }
  }
}

/// Another rank had the Inf: its amax came, and the elements here are finite.
TEST_P(NanOption, AGivenAmaxOfInfIsSeen) {
  for (const std::string_view name : {"fp8_tensor:nan", "fp8_tensor:e5m2:pow2:nan"}) {
    const Quantized q = quantized(GetParam(), QuantSpec::parse(name), with_element(DType::f32, 1),
                                  {.directions = {true, false}, .amax = kInf});
    for (const float value : decoded(GetParam(), q, Direction::rowwise)) ASSERT_TRUE(std::isnan(value)) << name;
  }
}

bool line_is_nan(const QuantSpec& spec, int64_t row) {
  // The code of NaN where only an Inf is in the scale.
  return spec.row().scope != Scope::block ? row == kRow : shares(spec, Direction::rowwise, row, kCol);
}

/// A line of a product whose operand has such a block is NaN, also where the other operand is zero.
TEST_P(NanOption, ALineOfAProductIsNan) {
  for (const QuantSpec& spec : specs_with_nan()) {
    if (spec.stochastic || spec.hadamard != Hadamard::off) continue;
    const Quantized a = quantized(GetParam(), spec, with_element(DType::f32, kNan)),
                    b = quantized(GetParam(), without(spec), Input({19, kCols}, DType::f32, Kind::zeros, 1));
    std::vector<float> out(kRows * 19);
    GetParam().run.gemm({.a = a.operand(Direction::rowwise),
                         .b = b.operand(Direction::rowwise),
                         .out = {out.data(), DType::f32, kRows, 19, 19}});
    for (int64_t r = 0; r < kRows; ++r)
      for (int64_t c = 0; c < 19; ++c)
        ASSERT_EQ(std::isnan(out[static_cast<size_t>(r * 19 + c)]), line_is_nan(spec, r))
            << spec << " at " << r << ", " << c;
  }
}

}  // namespace
}  // namespace quire::testing
