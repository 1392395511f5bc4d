// Rules that are functions of numbers: nvcc's code of them, run by the emulator, against g++'s.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "cuda/cuda_device.h"
#include "cuda/device_arrays.h"
#include "cuda/kernels.h"
#include "quire/operations/operations.h"

namespace quire::testing {
namespace {

/// Numbers of every exponent and sign, with zeros, NaN and infinities.
std::vector<float> numbers() {
  std::vector<float> all{NAN, INFINITY, -INFINITY, 0.0f, -0.0f};
  for (uint32_t i = 0; i < 3000; ++i) all.push_back(std::bit_cast<float>(i * 1431655u + 77u * i * i));
  for (int i = -200; i < 200; ++i) all.push_back(static_cast<float>(i) * 0.53f);
  return all;
}

void expect_same(float expected, float value, float x) {
  if (std::isnan(expected) && std::isnan(value)) return;
  EXPECT_EQ(std::bit_cast<uint32_t>(expected), std::bit_cast<uint32_t>(value)) << "of " << x;
}

TEST(Functions, EveryActivationAndItsSlopeAreThoseOfTheCpu) {
  const std::vector<float> x = numbers();
  for (uint8_t kind = 0; kind < kActivations.size(); ++kind) {
    SCOPED_TRACE(kActivations[kind].name);
    emulator::HostMemory memory;
    const CurveJob job{{.kind = kind, .alpha = kActivations[kind].alpha},
                       device_array(memory, x),
                       device_array(memory, std::vector<CurvePoint>(x.size())),
                       static_cast<int64_t>(x.size())};
    run_kernel("curves", job, job.count, memory);
    for (size_t i = 0; i < x.size(); ++i) {
      const CurvePoint expected = point_of(job.activation, x[i]);
      expect_same(expected.value, job.points[i].value, x[i]);
      expect_same(expected.slope, job.points[i].slope, x[i]);
    }
  }
}

TEST(Functions, EveryConversionIsThatOfTheCpu) {
  const std::vector<float> x = numbers();
  emulator::HostMemory memory;
  const ConversionJob job{device_array(memory, x), device_array(memory, std::vector<Conversions>(x.size())),
                          static_cast<int64_t>(x.size())};
  run_kernel("convert", job, job.count, memory);
  for (size_t i = 0; i < x.size(); ++i) {
    const Conversions expected = conversions_of(x[i]), &found = job.results[i];
    EXPECT_EQ(expected.f16, found.f16) << x[i];
    EXPECT_EQ(expected.bf16, found.bf16) << x[i];
    EXPECT_EQ(encode(Format::e4m3, x[i]), found.e4m3) << x[i];
    EXPECT_EQ(encode(Format::e5m2, x[i]), found.e5m2) << x[i];
    EXPECT_EQ(encode(Format::e2m1, x[i]), found.e2m1) << x[i];
    expect_same(expected.from_f16, found.from_f16, x[i]);
    expect_same(expected.from_bf16, found.from_bf16, x[i]);
    expect_same(decode(Format::e4m3, found.e4m3), found.from_e4m3, x[i]);
    expect_same(decode(Format::e5m2, found.e5m2), found.from_e5m2, x[i]);
    expect_same(decode(Format::e2m1, found.e2m1), found.from_e2m1, x[i]);
  }
}

/// Runs of equal numbers: each few numbers around every code, halfway point and power of two, and any others.
std::vector<E2m1Codes> e2m1_runs() {
  std::vector<float> all = numbers();
  for (float x = 0x1p-30f; x < 0x1p30f; x *= 2)
    for (const float part : {1.0f, 1.25f, 1.5f, 1.625f, 1.75f})
      for (int beyond = -3; beyond <= 3; ++beyond)
        all.push_back(std::bit_cast<float>(std::bit_cast<uint32_t>(part * x) + static_cast<uint32_t>(beyond)));
  std::vector<E2m1Codes> runs;
  for (uint32_t i = 0; i < all.size(); ++i) {
    E2m1Codes run{};
    for (uint32_t n = 0; n < 16; ++n) run.x[n] = (n + i) % 3 ? all[i] : -all[i];
    for (uint32_t n = 0; n < 4; ++n) run.random[n] = i % 3 ? (i * 4 + n) * 0x9E3779B9u : i % 2 ? ~0u : 0u;
    runs.push_back(run);
  }
  return runs;
}

TEST(Functions, CodesOfFourBitsAreThoseOfTheCpu) {
  const std::vector<E2m1Codes> runs = e2m1_runs();
  emulator::HostMemory memory;
  const E2m1Job job{device_array(memory, runs), static_cast<int64_t>(runs.size())};
  run_kernel("encode_e2m1", job, job.count, memory);
  for (size_t i = 0; i < runs.size(); ++i)
    for (int n = 0; n < 16; ++n) {
      const float x = runs[i].x[n];
      const std::array<uint32_t, 4> random = std::to_array(runs[i].random);
      EXPECT_EQ(encode(Format::e2m1, x), job.runs[i].rounded[n / 8] >> n % 8 * 4 & 15u) << x << " at " << n;
      EXPECT_EQ(encode_stochastic(x, random_byte(random, n)), job.runs[i].stochastic[n / 8] >> n % 8 * 4 & 15u)
          << x << " at " << n;
    }
}

TEST(Functions, AnUpdateOfDelayedScalingIsThatOfTheCpu) {
  constexpr int64_t kLength = 5;
  for (const AmaxAlgorithm algorithm : {AmaxAlgorithm::max, AmaxAlgorithm::most_recent})
    for (const int margin : {0, 3, -2, 140, -1200}) {
      std::vector<float> history = numbers();
      history.resize(history.size() / kLength * kLength);
      for (float& x : history) x = std::fabs(x);
      const auto count = static_cast<int64_t>(history.size()) / kLength;
      std::vector<float> scale(static_cast<size_t>(count), 2.5f);
      emulator::HostMemory memory;
      const DelayedJob job{
          {algorithm, 57344, margin}, device_array(memory, history), device_array(memory, scale), kLength, count};
      run_kernel("update_delayed", job, count, memory);
      for (int64_t i = 0; i < count; ++i)
        expect_same(delayed_update(job.rule, {history.data() + i, kLength, count}, 0, 2.5f), job.scale[i],
                    static_cast<float>(margin));
      for (size_t i = 0; i < history.size(); ++i) expect_same(history[i], job.history[i], static_cast<float>(margin));
    }
}

TEST(Functions, CodesThatAreReorderedAreThoseThatTheCpuWritesInThatOrder) {
  constexpr int64_t kRows = 37, kCols = 75;
  std::vector<float> x(kRows * kCols);
  for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>(i));
  for (const char* text : {"mxfp8", "mxfp4", "nvfp4:rht", "mxfp8:e5m2"})
    for (const Direction direction : {Direction::rowwise, Direction::columnwise}) {
      SCOPED_TRACE(text);
      QuantSpec plain = QuantSpec::parse(text), interleaved = plain;
      interleaved.swizzled = false, interleaved.interleaved = true;
      const auto memory_of = [&](const QuantSpec& spec) {
        const auto sizes = counts(buffers<int64_t>(spec, {kRows, kCols}, direction));
        return std::array{std::vector<uint8_t>(static_cast<size_t>(sizes[0])),
                          std::vector<uint8_t>(static_cast<size_t>(sizes[1]))};
      };
      float amax = 0;
      const auto quantized = [&](const QuantSpec& spec) {
        auto parts = memory_of(spec);
        QuantizeProblem p{.spec = spec,
                          .x = {x.data(), DType::f32, kRows, kCols, kCols},
                          .rowwise = {},
                          .columnwise = {},
                          .random = {}};
        (direction == Direction::rowwise ? p.rowwise : p.columnwise) = {parts[0].data(), parts[1].data(), &amax};
        quantize(p);
        return parts;
      };
      const auto from = quantized(plain), expected = quantized(interleaved);
      CudaDevice device;
      DeviceMemory& memory = device.memory();
      const ValueLines lines(plain, {x.data(), DType::f32, kRows, kCols, kCols}, direction);
      const Operand operand{.spec = plain,
                            .direction = direction,
                            .outer = lines.outer,
                            .contraction = lines.contraction,
                            .data = device_array(memory, from[0]),
                            .scale = device_array(memory, from[1])};
      const auto empty = memory_of(interleaved);
      const ReorderProblem problem{operand, device_array(memory, empty[0]), device_array(memory, empty[1])};
      dispatch(problem, device);
      device.synchronize();
      EXPECT_TRUE(std::equal(expected[0].begin(), expected[0].end(), static_cast<uint8_t*>(problem.data)));
      EXPECT_TRUE(std::equal(expected[1].begin(), expected[1].end(), static_cast<uint8_t*>(problem.scale)));
    }
}

}  // namespace
}  // namespace quire::testing
