// The row "tiles": which problems it takes, that each place of a thread meets every value, and what it costs.
#include <gtest/gtest.h>

#include <array>
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
    {"mxfp4", "", {69, 69}},
    {"nvfp4", "", {76, 74}},
    {"nvfp4:16x16", "", {72, 72}},
    {"nvfp4:16x16:nan:swizzled", "", {76, 76}},
    {"nvfp4:rht", "", {96, 94}},
    {"nvfp4:sr", "", {104, 102}},
    {"nvfp4:rht:sr:swizzled", "", {127, 125}},
    {"nvfp4:given:nan", "", {73, 71}},
    {"fp8_row", "", {71, 30}},
    {"fp8_row:e5m2:pow2:nan", "", {72, 31}},
    {"nvfp4:row_scaled:nan", "", {83, 81}},
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

}  // namespace
}  // namespace quire::testing
