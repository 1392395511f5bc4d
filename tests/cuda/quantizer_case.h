// One tensor, quantized by the CPU and by the kernels of kernels.cu on the emulator, into buffers that are compared.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "cuda/kernels.h"
#include "cuda/ptx_files.h"
#include "quire/quantize/quantize.h"

namespace quire::testing {

struct QuantizerCase {
  std::string spec;
  DType dtype = DType::f32;
  int64_t rows = 0, cols = 0, stride = 0;
  bool scale = false;  ///< from the caller, instead of one that follows from the amax
  bool amax = false;   ///< from the caller
  bool state = false;  ///< random numbers of a module's state, and of a part of a larger tensor
  std::string kernel = "quantize_any";

  std::string text() const {
    return spec + " of " + std::string(name(dtype)) + " [" + std::to_string(rows) + ", " + std::to_string(cols) +
           "], stride " + std::to_string(stride) + (scale ? ", scale" : "") + (amax ? ", amax" : "") +
           (state ? ", state" : "") + ", by " + kernel;
  }
};

/// One direction's buffers in memory of the emulator, which the CPU writes too.
class SideMemory {
 public:
  SideMemory(emulator::Memory& memory, const Buffers<int64_t>& layout) {
    const Buffer<int64_t>* buffers[] = {&layout.data, &layout.scale, &layout.amax};
    for (const Buffer<int64_t>* buffer : buffers) {
      const int64_t bytes = product(buffer->sizes, 0, buffer->sizes.size()) * size_of(buffer->dtype);
      parts_.push_back({memory.allocate(static_cast<size_t>(bytes)), static_cast<size_t>(bytes)});
    }
  }
  Side side() const {
    return {parts_[0].at, parts_[1].at, parts_[2].bytes ? reinterpret_cast<float*>(parts_[2].at) : nullptr};
  }
  /// The padding of codes and scales of a byte is 0, which whoever launches the kernels sees to.
  void clear_padding(const QuantSpec& spec) {
    if (spec.interleaved) std::memset(parts_[0].at, 0, parts_[0].bytes);
    if (has_byte_scales(spec)) std::memset(parts_[1].at, 0, parts_[1].bytes);
  }
  /// The first difference as text, or "".
  std::string difference(const SideMemory& other) const {
    for (size_t i = 0; i < parts_.size(); ++i)
      for (size_t at = 0; at < parts_[i].bytes; ++at)
        if (parts_[i].at[at] != other.parts_[i].at[at])
          return std::string(i == 0   ? "data"
                             : i == 1 ? "scale"
                                      : "amax") +
                 " differs at byte " + std::to_string(at) + " of " + std::to_string(parts_[i].bytes);
    return "";
  }

 private:
  struct Part {
    std::byte* at;
    size_t bytes;
  };
  std::vector<Part> parts_;
};

/// Runs cases; counts what was compared.
class QuantizerComparison {
 public:
  explicit QuantizerComparison(uint64_t seed) : dice_(seed) {}

  uint64_t die(uint64_t n) { return dice_() % n; }
  /// x(row, col) in float32, rounded to the case's dtype.
  template <class Values>
  void run(const QuantizerCase& c, Values&& x);

  uint64_t compared = 0, steps = 0;

 private:
  float* floats(int64_t count) {
    return reinterpret_cast<float*>(memory_.allocate(static_cast<size_t>(count) * sizeof(float)));
  }
  int64_t* integers(std::initializer_list<int64_t> values) {
    auto* to = reinterpret_cast<int64_t*>(memory_.allocate(values.size() * sizeof(int64_t)));
    std::copy(values.begin(), values.end(), to);
    return to;
  }
  QuantizeProblem problem_of(const QuantizerCase& c);
  void compare(const QuantizerCase& c, QuantizeProblem p, Direction direction);
  void compare_values(const QuantizeProblem& p, Direction direction, const Side& side);
  void compare_amaxes(const QuantizeProblem& p, Direction direction, const uint32_t* measured);

  emulator::Memory memory_;
  std::mt19937_64 dice_;
};

inline int64_t line_count(const QuantizeProblem& p, Direction d) {
  return d == Direction::rowwise ? p.x.rows : p.x.cols;
}

inline QuantizeProblem QuantizerComparison::problem_of(const QuantizerCase& c) {
  QuantizeProblem p;
  p.spec = QuantSpec::parse(c.spec);
  const int64_t elements = c.rows == 0 ? 0 : (c.rows - 1) * c.stride + c.cols;
  p.x = {memory_.allocate(static_cast<size_t>(elements * size_of(c.dtype))), c.dtype, c.rows, c.cols, c.stride};
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

inline void QuantizerComparison::compare_amaxes(const QuantizeProblem& p, Direction direction,
                                                const uint32_t* measured) {
  const int64_t count = amax_count(p.spec, line_count(p, direction));
  std::vector<float> expected(static_cast<size_t>(count));
  AmaxProblem problem{.spec = p.spec, .x = p.x};
  (direction == Direction::rowwise ? problem.rowwise : problem.columnwise) = expected.data();
  amax(problem);
  for (size_t i = 0; i < expected.size(); ++i)
    EXPECT_EQ(std::bit_cast<uint32_t>(expected[i]), measured[i]) << "amax " << i;
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
  const size_t bytes = static_cast<size_t>(lines.outer * lines.contraction * size_of(d.out.dtype));
  DequantizeProblem cpu = d;
  cpu.out.data = memory_.allocate(bytes);
  dequantize(cpu);
  d.out.data = memory_.allocate(bytes);
  steps += run_kernel("dequantize_any", d, lines.outer * lines.contraction, memory_);
  for (int64_t i = 0; i < lines.outer * lines.contraction; ++i) {
    // Which NaN it is depends on the processor.
    const float expected = load_element(cpu.out.data, d.out.dtype, i), value = load_element(d.out.data, d.out.dtype, i);
    if (std::isnan(expected) && std::isnan(value)) continue;
    ASSERT_EQ(std::bit_cast<uint32_t>(expected), std::bit_cast<uint32_t>(value)) << "value " << i;
  }
}

inline void QuantizerComparison::compare(const QuantizerCase& c, QuantizeProblem p, Direction direction) {
  const ValueLines lines(p.spec, p.x, direction);
  const Buffers<int64_t> layout = buffers<int64_t>(p.spec, {p.x.rows, p.x.cols}, direction);
  const int64_t above = amax_count(p.spec, lines.outer);
  if (c.amax && above > 0) {
    float* amaxes = floats(above);
    for (int64_t i = 0; i < above; ++i)
      amaxes[i] = die(9) == 0 ? (die(2) ? 0.0f : INFINITY) : static_cast<float>(die(4096)) / 512;
    (direction == Direction::rowwise ? p.amax.rowwise : p.amax.columnwise) = amaxes;
  }
  SideMemory cpu(memory_, layout), device(memory_, layout);
  Side& side = direction == Direction::rowwise ? p.rowwise : p.columnwise;
  side = cpu.side();
  quantize(p);
  side = device.side();
  device.clear_padding(p.spec);
  QuantizeJob job{p, direction, reinterpret_cast<uint32_t*>(floats(above))};
  std::fill_n(job.above, above, 0u);
  const int64_t parts = Parts(lines).count;
  if (above > 0) {
    steps += run_kernel("measure_amax", job, parts, memory_);
    compare_amaxes(p, direction, job.above);
  }
  steps += run_kernel(c.kernel, job, parts, memory_);
  EXPECT_EQ(cpu.difference(device), "") << (direction == Direction::rowwise ? "rowwise" : "columnwise");
  compare_values(p, direction, cpu.side());
  compared += 3;
}

template <class Values>
void QuantizerComparison::run(const QuantizerCase& c, Values&& x) {
  SCOPED_TRACE(c.text());
  memory_.clear();
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
