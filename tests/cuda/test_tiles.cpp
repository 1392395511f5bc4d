// The row "tiles": which problems it takes, that each place of a thread meets every value, and what it costs.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <iostream>

#include "cuda/many_cases.h"
#include "cuda/quantizer_case.h"

namespace quire::testing {
namespace {

/// Compute capabilities that modules have code of their own for.
constexpr std::array kCodes{80, 89};

struct Taken {
  const char* spec;
  const char* why;           ///< that the row refuses with; empty: it takes the spec
  std::array<int, 2> steps;  ///< most instructions of an element of bfloat16, both directions, with amaxes measured
                             ///< before, in the code for each of kCodes
};
constexpr Taken kTaken[]{
    {"fp8_tensor", "", {66, 25}},
    {"fp8_tensor:e5m2", "", {66, 25}},
    {"fp8_block", "", {67, 26}},
    {"fp8_block:e5m2:pow2:nan", "", {70, 29}},
    {"fp8_block:128x128", "", {64, 22}},
    {"fp8_block:128x128:e5m2:pow2:nan", "", {65, 24}},
    {"mxfp8", "", {70, 29}},
    {"mxfp8:e5m2:swizzled:nan", "", {73, 32}},
    {"mxfp8:32x32", "", {67, 26}},
    {"mxfp8:e5m2:32x32:nan", "", {69, 28}},
    {"mxfp4", "", {45, 45}},
    {"nvfp4", "", {52, 50}},
    {"nvfp4:16x16", "", {50, 50}},
    {"nvfp4:16x16:nan:swizzled", "", {52, 52}},
    {"nvfp4:rht", "", {70, 68}},
    {"nvfp4:sr", "", {85, 83}},
    {"nvfp4:rht:sr:swizzled", "", {103, 101}},
    {"nvfp4:given:nan", "", {56, 54}},
    {"fp8_row", "", {71, 30}},
    {"fp8_row:e5m2:pow2:nan", "", {72, 31}},
    {"nvfp4:row_scaled:nan", "", {60, 58}},
    {"nvfp4:16x16:sr", "no kernel is compiled for nvfp4:16x16:sr", {}},
    {"mxfp8:interleaved", "writes codes in the plain order, but mxfp8:interleaved is interleaved", {}},
    {"nvfp4:4over6=mae", "", {230, 230}},
    {"nvfp4:4over6=mse:256:nan", "", {255, 255}},
    {"nvfp4:16x16:4over6=mae:256", "", {272, 272}},
    {"nvfp4:row_scaled:4over6=mse", "", {209, 209}},
    {"nvfp4:rht=unsigned", "no kernel is compiled for nvfp4:rht=unsigned", {}},
};

/// Both directions of a matrix of bfloat16.
QuantizeProblem problem_of(Twins& twins, const char* spec, int64_t rows, int64_t cols) {
  QuantizeProblem p;
  p.spec = QuantSpec::parse(spec), p.x = {nullptr, DType::bf16, rows, cols, cols};
  std::vector<uint16_t> x(static_cast<size_t>(rows * cols));
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<uint16_t>(0x3F00 + i * 37 % 256 + (i % 3) * 0x8000);
  p.x.data = twins.array(x);
  if (p.spec.given) p.scale = twins.array(std::vector{0.5f});
  for (const Direction d : {Direction::rowwise, Direction::columnwise}) {
    const auto count = counts(buffers<int64_t>(p.spec, {rows, cols}, d));
    (d == Direction::rowwise ? p.rowwise : p.columnwise) = {
        twins.room<std::byte>(count[0]), twins.room<float>(count[1]), count[2] ? twins.room<float>(count[2]) : nullptr};
  }
  return p;
}

TEST(Tiles, TakeTheSpecsOfTheRecipesAndSayWhyTheyTakeNoOther) {
  Twins twins;
  for (const Taken& taken : kTaken) {
    const std::string verdict = *taken.why ? taken.why : "runs";
    const std::string rest = *taken.why ? "runs" : "not asked, tiles comes first";
    EXPECT_EQ(explain_choice(problem_of(twins, taken.spec, 16, 32), twins.device),
              "tiles: " + verdict + "\nreference: " + rest + "\n");
  }
  EXPECT_EQ(explain_choice(problem_of(twins, "mxfp8", 0, 32), twins.device),
            "tiles: takes tensors with elements, but x is empty\nreference: runs\n");
}

/// Compares the bytes of both directions; returns how many instructions an element took.
double steps_of(const char* spec, int code) {
  Twins twins;
  twins.device.run_code_of(code);
  const QuantizeProblem p = problem_of(twins, spec, 256, 256);
  const auto row = counts(buffers<int64_t>(p.spec, {256, 256}, Direction::rowwise));
  const auto column = counts(buffers<int64_t>(p.spec, {256, 256}, Direction::columnwise));
  const int64_t width = has_byte_scales(p.spec) ? 1 : 4;
  twins.expect_same(p, {{"rowwise data", p.rowwise.data, row[0]},
                        {"rowwise scale", p.rowwise.scale, row[1] * width},
                        {"rowwise amax", p.rowwise.amax, row[2] * 4},
                        {"columnwise data", p.columnwise.data, column[0]},
                        {"columnwise scale", p.columnwise.scale, column[1] * width},
                        {"columnwise amax", p.columnwise.amax, column[2] * 4}});
  return static_cast<double>(twins.device.steps()) / (256 * 256);
}

TEST(Tiles, WriteBothDirectionsOfWholeTilesInFewInstructions) {
  if (on_gpu()) GTEST_SKIP() << "a GPU counts no instructions";
  for (const Taken& taken : kTaken)
    for (size_t i = 0; i < kCodes.size() && !*taken.why; ++i) {
      const double steps = steps_of(taken.spec, kCodes[i]);
      std::cout << taken.spec << ", code for " << kCodes[i] << ": " << steps << " instructions an element\n";
      EXPECT_LT(steps, taken.steps[i]) << taken.spec << ", code for " << kCodes[i];
    }
}

TEST(Tiles, GiveEachPlaceOfARunTheBytesOfTheCpuForEveryValueOfItsDtype) {
  QuantizerComparison cases(5);
  const int64_t rows = 64, cols = 1024, step = many_cases() ? 1 : 16;
  for (const char* spec : {"mxfp8", "fp8_block:nan", "fp8_tensor", "mxfp8:e5m2:32x32", "fp8_block:128x128:nan", "mxfp4",
                           "fp8_row", "nvfp4:rht:sr", "nvfp4:nan", "nvfp4:16x16", "nvfp4:4over6=mae",
                           "nvfp4:16x16:4over6=mse:256", "nvfp4:4over6=mse:nan"})
    for (const DType dtype : {DType::bf16, DType::f16})
      for (const int code : kCodes)
        for (int64_t place = code % 16; place < code % 16 + 16; place += step) {
          if (!many_cases() && (code == 80) != (dtype == DType::f16)) continue;
          cases.device().run_code_of(code);
          const QuantizerCase c{.spec = spec, .dtype = dtype, .rows = rows, .cols = cols, .stride = cols};
          cases.run(c, [&](int64_t i, int64_t j) {
            const auto bits = static_cast<uint16_t>((i * cols + j + place * (cols + 1)) * 9);
            return dtype == DType::f16 ? f16_to_f32(bits) : bf16_to_f32(bits);
          });
        }
}

/// A number `steps` numbers of a dtype beyond x, which is one of its numbers.
float beside(float x, DType dtype, int steps) {
  const int unit = dtype == DType::f32 ? 1 : dtype == DType::f16 ? 1 << 13 : 1 << 16;
  return x == 0 ? static_cast<float>(steps) * 0x1p-24f
                : std::bit_cast<float>(std::bit_cast<uint32_t>(x) + static_cast<uint32_t>(steps * unit));
}

TEST(Tiles, GiveEachPlaceOfARunTheBytesOfTheCpuAroundEveryCodeOfFourBitsAndEveryHalfwayPoint) {
  QuantizerComparison cases(6);
  std::vector<float> points{0, 7, 6.5f, 8, 448, NAN, INFINITY};
  for (const float x : {0.25f, 0.5f, 0.75f, 1.0f, 1.25f, 1.5f, 1.75f, 2.0f, 2.5f, 3.0f, 3.5f, 4.0f, 5.0f, 6.0f})
    points.push_back(x);
  const int64_t rows = 64, cols = 1024, places = many_cases() ? 16 : 2;
  for (const char* spec :
       {"mxfp4", "nvfp4", "nvfp4:nan", "nvfp4:16x16", "nvfp4:row_scaled", "nvfp4:sr", "nvfp4:rht:sr"})
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
      for (const int code : kCodes)
        for (int64_t place = 0; place < places; ++place) {
          cases.device().run_code_of(code);
          const QuantizerCase c{.spec = spec, .dtype = dtype, .rows = rows, .cols = cols, .stride = cols};
          cases.run(c, [&](int64_t i, int64_t j) {
            // Numbers of 16 rows and 16 columns have one number above 6 at most, which is 6, and so the scale 1, but
            // every eighth such square: its numbers are any. The largest of all makes the scales of NVFP4 so.
            const int64_t square = i / 16 * 64 + j / 16, at = i * 7 + j * 5 + place * 3;
            if (i == 0 && j == 0) return 2688.0f;
            if (square > 0 && at % 16 == 0) return 6.0f;
            const auto n = static_cast<size_t>(at + square);
            const float x = points[square % 8 ? 7 + n % 14 : n % points.size()];
            const float beyond = std::isfinite(x) ? beside(x, dtype, static_cast<int>((i + j / 16) % 5) - 2) : x;
            const float number = square % 8 ? std::min(beyond, 6.0f) : beyond;
            return (i + j + place) % 3 ? number : -number;
          });
        }
}

}  // namespace
}  // namespace quire::testing
