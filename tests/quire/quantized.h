// Quantized tensors with memory of their own, and the implementations under test.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "guarded.h"
#include "here.h"
#include "quire/base/check.h"
#include "quire/cpu/isa.h"
#include "quire/operations/operations.h"
#include "quire/reference/gemm.h"
#include "quire/reference/pointwise.h"
#include "quire/reference/quantize.h"
#include "quire/spec/problem.h"

namespace quire::testing {

/// An implementation of every operation.
struct Runner {
  std::string name;
  cpu::Kernels run;
};

inline const Runner& reference_runner() {
  static const Runner runner{"reference",
                             {reference::quantize, reference::dequantize, reference::gemm, reference::column_sum,
                              reference::norm, reference::norm_grad, reference::activation, reference::activation_grad,
                              nullptr, reference::amax, reference::matmul}};
  return runner;
}

/// The instruction set in use (QUIRE_ISA), products, codes and values by the kernel that is chosen; elsewhere, the
/// kernels of that device.
inline const Runner& active_runner() {
  static const Runner runner = [] {
    Runner chosen{std::string(cpu::active().name), *cpu::active().kernels};
    chosen.run.gemm = [](const GemmProblem& p) { gemm(p, here()); };
    chosen.run.quantize = [](const QuantizeProblem& p) { quantize(p, here()); };
    chosen.run.dequantize = [](const DequantizeProblem& p) { dequantize(p, here()); };
    if (!elsewhere()) return chosen;
    chosen.name = here().device->name;
    chosen.run.column_sum = [](const ColumnSumProblem& p) { column_sum(p, here()); };
    chosen.run.norm = [](const NormProblem& p) { norm(p, here()); };
    chosen.run.norm_grad = [](const NormGradProblem& p) { norm_grad(p, here()); };
    chosen.run.activation = [](const ActivationProblem& p) { activation(p, here()); };
    chosen.run.activation_grad = [](const ActivationGradProblem& p) { activation_grad(p, here()); };
    chosen.run.amax = [](const AmaxProblem& p) { amax(p, here()); };
    chosen.run.matmul = [](const MatmulProblem& p) { matmul(p, here()); };
    return chosen;
  }();
  return runner;
}

inline void PrintTo(const Runner& runner, std::ostream* out) { *out << runner.name; }

class EveryRunner : public ::testing::TestWithParam<Runner> {};

inline std::string runner_name(const ::testing::TestParamInfo<Runner>& info) { return info.param.name; }

/// Instantiates a suite for the reference first, then for the instruction set in use.
#define QUIRE_FOR_EVERY_RUNNER(Suite)                                                                                  \
  INSTANTIATE_TEST_SUITE_P(All, Suite,                                                                                 \
                           ::testing::Values(::quire::testing::reference_runner(), ::quire::testing::active_runner()), \
                           ::quire::testing::runner_name)

struct QuantizedSide {
  Guarded data, scale, amax;
};

/// Buffers of both directions; `wanted` says which of them a problem gets.
struct Quantized {
  QuantSpec spec;
  int64_t rows, cols;
  std::array<bool, 2> wanted;
  std::array<QuantizedSide, 2> sides;

  Quantized(QuantSpec s, int64_t m, int64_t k, std::array<bool, 2> directions = {true, true})
      : spec(s), rows(m), cols(k), wanted(directions) {
    for (size_t d = 0; d < 2; ++d) {
      const Buffers<int64_t> b = buffers<int64_t>(spec, {rows, cols}, static_cast<Direction>(d));
      const auto memory = [](const Buffer<int64_t>& buffer) {
        return Guarded(product(buffer.sizes, 0, buffer.sizes.size()) * size_of(buffer.dtype));
      };
      sides[d] = {memory(b.data), memory(b.scale), memory(b.amax)};
    }
  }

  QuantizedSide& side(Direction d) { return sides[static_cast<size_t>(d)]; }
  const QuantizedSide& side(Direction d) const { return sides[static_cast<size_t>(d)]; }

  Side view(Direction d) {
    if (!wanted[static_cast<size_t>(d)]) return {};
    return {side(d).data.data(), side(d).scale.data(), side(d).amax.as<float>()};
  }

  bool intact() const {
    for (const QuantizedSide& s : sides)
      if (!s.data.intact() || !s.scale.intact() || !s.amax.intact()) return false;
    return true;
  }

  Operand operand(Direction d) const {
    const bool columnwise = d == Direction::columnwise;
    const int64_t tokens = columnwise ? columnwise_tokens(spec, rows) : 0;
    return {.spec = spec,
            .direction = d,
            .outer = columnwise ? cols : rows,
            .contraction = columnwise ? tokens : cols,
            .data = side(d).data.data(),
            .scale = side(d).scale.data(),
            .amax = side(d).amax.as<float>()};
  }

  /// The problem that decodes a direction, without its output.
  DequantizeProblem decoding(Direction d) const {
    return {.spec = spec,
            .direction = d,
            .rows = rows,
            .cols = cols,
            .data = side(d).data.data(),
            .scale = side(d).scale.data(),
            .amax = side(d).amax.as<float>(),
            .out = {}};
  }
};

/// What else a quantization is given.
struct QuantizeOptions {
  std::array<bool, 2> directions{true, true};
  Randomness random{};
  const float* scale = nullptr;
  std::optional<float> amax{};
};

inline Quantized quantized(const Runner& runner, const QuantSpec& spec, const Matrix& x,
                           const QuantizeOptions& options = {}) {
  Quantized q(spec, x.rows, x.cols, options.directions);
  const OneHere scale(options.scale), amax(options.amax ? &*options.amax : nullptr);
  runner.run.quantize({.spec = spec,
                       .x = x,
                       .rowwise = q.view(Direction::rowwise),
                       .columnwise = q.view(Direction::columnwise),
                       .random = options.random,
                       .scale = scale.get(),
                       .amax = {.rowwise = amax.get()}});
  EXPECT_TRUE(q.intact()) << "wrote outside a buffer";
  return q;
}

/// One direction decoded to float32, as [outer, contraction].
inline std::vector<float> dequantized(const Runner& runner, const Quantized& q, Direction d) {
  const Operand o = q.operand(d);
  Guarded out(o.outer * o.contraction * 4);
  DequantizeProblem p = q.decoding(d);
  p.out = {out.data(), DType::f32, o.outer, o.contraction, o.contraction};
  runner.run.dequantize(p);
  EXPECT_TRUE(out.intact()) << "wrote outside a buffer";
  return {out.as<float>(), out.as<float>() + o.outer * o.contraction};
}

/// Empty if the bytes are equal; else where they differ first and how often.
inline std::string difference(const void* expected, const void* actual, int64_t bytes) {
  const auto* e = static_cast<const uint8_t*>(expected);
  const auto* a = static_cast<const uint8_t*>(actual);
  int64_t first = -1, count = 0;
  for (int64_t i = 0; i < bytes; ++i)
    if (e[i] != a[i] && count++ == 0) first = i;
  if (count == 0) return {};
  return text(count, " of ", bytes, " bytes differ, first at ", first, ": expected ", int{e[first]}, ", got ",
              int{a[first]});
}

inline std::string difference(const Guarded& expected, const Guarded& actual) {
  if (expected.size() != actual.size()) return text("sizes differ: ", expected.size(), " and ", actual.size());
  return difference(expected.data(), actual.data(), expected.size());
}

/// Same bits, where any NaN equals any NaN.
inline std::string float_difference(const float* expected, const float* actual, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    if (std::memcmp(expected + i, actual + i, 4) != 0 && !(expected[i] != expected[i] && actual[i] != actual[i]))
      return text("floats differ at ", i, ": expected ", expected[i], ", got ", actual[i]);
  return {};
}

}  // namespace quire::testing
