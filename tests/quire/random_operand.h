// Operands of random codes with the numbers that they mean, decoded by the contract's own words.
#pragma once

#include <array>
#include <cmath>
#include <vector>

#include "inputs.h"
#include "quantized.h"
#include "quire/format/codec.h"

namespace quire::testing {

/// An operand of random codes and scales with the numbers that they mean. Scales are finite and keep sums small.
struct RandomOperand {
  Quantized memory;
  Operand operand;
  std::vector<double> values;  ///< [outer, contraction]

  RandomOperand(std::string_view text, Direction d, std::array<int64_t, 2> size, uint64_t seed, bool finite = true)
      : memory(QuantSpec::parse(text), size[d == Direction::columnwise], size[d == Direction::rowwise]),
        operand(memory.operand(d)) {
    Random r(seed);
    QuantizedSide& side = memory.side(d);
    for (int64_t i = 0; i < side.data.size(); ++i) side.data.as<uint8_t>()[i] = random_code(r, finite);
    const ScaleKind kind = operand.spec.row().scale;
    if (kind == ScaleKind::f32) {
      for (int64_t i = 0; i < side.scale.size() / 4; ++i)
        side.scale.as<float>()[i] = static_cast<float>(0.001 + 0.1 * r.uniform());
    } else {
      // E8M0: 2^-14 to 2^-3. E4M3: every finite value that is not negative.
      for (int64_t i = 0; i < side.scale.size(); ++i)
        side.scale.as<uint8_t>()[i] = static_cast<uint8_t>(kind == ScaleKind::e8m0 ? 113 + r.below(12) : r.below(127));
    }
    for (int64_t i = 0; i < side.amax.size() / 4; ++i)
      side.amax.as<float>()[i] = static_cast<float>(0.5 + 4 * r.uniform());
    decode_values();
  }

  uint8_t random_code(Random& r, bool finite) const {
    for (;;) {
      const auto byte = static_cast<uint8_t>(r.below(256));
      if (!finite || operand.spec.packed() || std::isfinite(decode(operand.spec.element, byte))) return byte;
    }
  }

  /// numerics.md 3.3, 4.3, 4.5, 5.5: written out again, so that the library's index maps are tested too.
  int64_t scale_place(int64_t o, int64_t l) const {
    const std::string family(operand.spec.row().name);
    const bool columnwise = operand.direction == Direction::columnwise;
    if (family == "fp8_tensor") return 0;
    if (family == "fp8_row") return o;
    const int64_t length = family == "fp8_block" ? 128 : family == "nvfp4" ? 16 : 32;
    const int64_t blocks = (operand.contraction + length - 1) / length, j = l / length;
    if (family == "fp8_block") return operand.spec.square ? o / 128 * blocks + j : j * operand.outer + o;
    if (operand.spec.interleaved) return interleaved_place(o, j, blocks);
    if (operand.spec.swizzled)
      return ((o / 128) * ((blocks + 3) / 4) + j / 4) * 512 + (o % 32) * 16 + (o % 128) / 32 * 4 + j % 4;
    return family == "mxfp8" && columnwise ? j * operand.outer + o : o * blocks + j;
  }

  /// numerics.md 2.4, with / for div.
  static int64_t interleaved_place(int64_t line, int64_t byte, int64_t bytes) {
    return (line / 16 * ((bytes + 3) / 4) + byte / 4) * 64 + line % 16 * 4 + byte % 4;
  }

  double scale(int64_t o, int64_t l) const {
    const int64_t at = scale_place(o, l);
    const auto* bytes = static_cast<const uint8_t*>(operand.scale);
    const ScaleKind kind = operand.spec.row().scale;
    if (kind == ScaleKind::f32) return static_cast<double>(static_cast<const float*>(operand.scale)[at]);
    if (kind == ScaleKind::e8m0) return std::ldexp(1.0, bytes[at] - 127);
    const double amax = static_cast<double>(operand.amax[operand.spec.row_scaled ? o : 0]);
    const double block = static_cast<double>(decode(Format::e4m3, bytes[at]));
    if (operand.spec.global == Global::multiplier) return block * amax;
    if (operand.spec.global == Global::divisor) return block / amax;
    return block * amax / (operand.spec.block_scale_max_256 ? 1536 : 2688);
  }

  void decode_values() {
    values.clear();
    const auto* data = static_cast<const uint8_t*>(operand.data);
    const bool untransposed = operand.spec.row().name == "mxfp8" && operand.direction == Direction::columnwise;
    for (int64_t o = 0; o < operand.outer; ++o)
      for (int64_t l = 0; l < operand.contraction; ++l) {
        const int64_t line = operand.spec.packed() ? (operand.contraction + 1) / 2 : operand.contraction;
        const int64_t byte = operand.spec.packed() ? l / 2 : l;
        const int64_t place = operand.spec.interleaved ? interleaved_place(o, byte, line)
                              : untransposed           ? l * operand.outer + o
                                                       : o * line + byte;
        int code = data[place];
        if (operand.spec.packed()) code = code >> (l % 2 * 4) & 15;
        values.push_back(static_cast<double>(decode(operand.spec.element, code)) * scale(o, l));
      }
  }
};

}  // namespace quire::testing
