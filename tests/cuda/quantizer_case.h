// One tensor, quantized by the CPU and by the kernels of kernels.cu on the emulator, into buffers that are compared.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "cuda/twins.h"
#include "quire/operations/operations.h"
#include "quire/spec/block_codes.h"

namespace quire::testing {

struct QuantizerCase {
  std::string spec;
  DType dtype = DType::f32;
  int64_t rows = 0, cols = 0, stride = 0;
  bool scale = false;       ///< from the caller, instead of one that follows from the amax
  bool amax = false;        ///< from the caller
  bool state = false;       ///< random numbers of a module's state, and of a part of a larger tensor
  std::string kernel = "";  ///< of kernels.cu, in the place of the reference's quantize_any
  bool reference = false;   ///< by the reference alone

  std::string text() const {
    return spec + " of " + std::string(name(dtype)) + " [" + std::to_string(rows) + ", " + std::to_string(cols) +
           "], stride " + std::to_string(stride) + (scale ? ", scale" : "") + (amax ? ", amax" : "") +
           (state ? ", state" : "") + (kernel.empty() ? "" : ", by " + kernel) +
           (reference ? ", by the reference" : "");
  }
};

/// Runs cases; counts what was compared.
class QuantizerComparison {
 public:
  explicit QuantizerComparison(uint64_t seed) : dice_(seed) {}

  uint64_t die(uint64_t n) { return dice_() % n; }
  /// x(row, col) in float32, rounded to the case's dtype.
  template <class Values>
  void run(const QuantizerCase& c, Values&& x);

  CudaDevice& device() { return twins_.device; }

  uint64_t compared = 0, steps = 0;

 private:
  float* floats(int64_t count) {
    return reinterpret_cast<float*>(twins_.device.memory().allocate(static_cast<size_t>(count) * sizeof(float)));
  }
  int64_t* integers(std::initializer_list<int64_t> values) {
    auto* to = reinterpret_cast<int64_t*>(twins_.device.memory().allocate(values.size() * sizeof(int64_t)));
    std::copy(values.begin(), values.end(), to);
    return to;
  }
  QuantizeProblem problem_of(const QuantizerCase& c);
  void compare(const QuantizerCase& c, QuantizeProblem p, Direction direction);
  void compare_values(const QuantizeProblem& p, Direction direction, const Side& side);

  Twins twins_;
  std::mt19937_64 dice_;
};

inline int64_t line_count(const QuantizeProblem& p, Direction d) {
  return d == Direction::rowwise ? p.x.rows : p.x.cols;
}

inline QuantizeProblem QuantizerComparison::problem_of(const QuantizerCase& c) {
  QuantizeProblem p;
  p.spec = QuantSpec::parse(c.spec);
  const int64_t elements = c.rows == 0 ? 0 : (c.rows - 1) * c.stride + c.cols;
  p.x = {twins_.device.memory().allocate(static_cast<size_t>(elements * size_of(c.dtype))), c.dtype, c.rows, c.cols,
         c.stride};
  p.random.seed = 5, p.random.rowwise_offset = 7, p.random.columnwise_offset = uint64_t{1} << 40;
  if (c.scale || p.spec.given) {
    float* scale = floats(1);
    *scale = std::ldexp(1.0f + static_cast<float>(die(1000)) / 1024, static_cast<int>(die(9)) - 4);
    p.scale = scale;
  }
  if (c.state) {
    p.random.state = integers({11, 3});
    p.random.axis = static_cast<int>(die(2));
    const int64_t along = p.random.axis == 0 ? c.rows : c.cols;
    p.random.cuts = along >= 32 ? 2 : 0;
    p.random.part = integers({1, 3, along / 32 * 16, along});
  }
  return p;
}

inline void QuantizerComparison::compare_values(const QuantizeProblem& p, Direction direction, const Side& side) {
  const bool columnwise = direction == Direction::columnwise;
  const ValueLines lines(p.spec, p.x, direction);
  DequantizeProblem d{.spec = p.spec,
                      .direction = direction,
                      .rows = p.x.rows,
                      .cols = p.x.cols,
                      .data = side.data,
                      .scale = side.scale,
                      .amax = side.amax,
                      .out = {}};
  d.out = {nullptr, columnwise ? p.x.dtype : DType::f32, lines.outer, lines.contraction, lines.contraction};
  const int64_t count = lines.outer * lines.contraction;
  d.out.data = twins_.room<std::byte>(count * size_of(d.out.dtype));
  DequantizeProblem cpu = d;
  cpu.out.data = twins_.room<std::byte>(count * size_of(d.out.dtype));
  dequantize(cpu);
  dequantize(d, twins_.device);
  if (on_gpu()) twins_.device.synchronize();
  for (int64_t i = 0; i < count; ++i) {
    // Which NaN it is depends on the processor.
    const float expected = load_element(cpu.out.data, d.out.dtype, i), value = load_element(d.out.data, d.out.dtype, i);
    if (std::isnan(expected) && std::isnan(value)) continue;
    ASSERT_EQ(std::bit_cast<uint32_t>(expected), std::bit_cast<uint32_t>(value)) << "value " << i;
  }
}

inline void QuantizerComparison::compare(const QuantizerCase& c, QuantizeProblem p, Direction direction) {
  const bool rowwise = direction == Direction::rowwise;
  const int64_t above = amax_count(p.spec, line_count(p, direction));
  if (above > 0) {
    float* amaxes = floats(above);
    AmaxProblem problem{.spec = p.spec, .x = p.x};
    (rowwise ? problem.rowwise : problem.columnwise) = amaxes;
    twins_.expect_same(problem, {{"amax", amaxes, above * 4}});
    for (int64_t i = 0; c.amax && i < above; ++i)
      amaxes[i] = die(9) == 0 ? (die(2) ? 0.0f : INFINITY) : static_cast<float>(die(4096)) / 512;
    if (c.amax) (rowwise ? p.amax.rowwise : p.amax.columnwise) = amaxes;
  }
  const auto count = counts(buffers<int64_t>(p.spec, {p.x.rows, p.x.cols}, direction));
  const int64_t scale_bytes = count[1] * (has_byte_scales(p.spec) ? 1 : 4);
  Side& side = rowwise ? p.rowwise : p.columnwise;
  side = {twins_.room<std::byte>(count[0]), twins_.room<std::byte>(scale_bytes), count[2] ? floats(count[2]) : nullptr};
  if (!on_gpu()) twins_.device.replace("quantize_any", c.kernel);
  twins_.expect_same(
      p, {{"data", side.data, count[0]}, {"scale", side.scale, scale_bytes}, {"amax", side.amax, count[2] * 4}});
  compare_values(p, direction, side);
  compared += 3;
  steps = twins_.device.steps();
}

template <class Values>
void QuantizerComparison::run(const QuantizerCase& c, Values&& x) {
  SCOPED_TRACE(c.text());
  twins_.device.clear();
  twins_.kernel = c.reference || !c.kernel.empty() ? "reference" : "";
  const QuantizeProblem p = problem_of(c);
  for (int64_t i = 0; i < c.rows; ++i)
    for (int64_t j = 0; j < c.cols; ++j) store_element(const_cast<void*>(p.x.data), c.dtype, i * c.stride + j, x(i, j));
  for (const Direction d : {Direction::rowwise, Direction::columnwise}) try {
      compare(c, p, d);
    } catch (const emulator::Error& e) {
      ADD_FAILURE() << e.what();
    }
}

}  // namespace quire::testing
