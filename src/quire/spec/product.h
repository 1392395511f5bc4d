// One output of a product: its terms, their scales, and what becomes of their sum (numerics.md 7.4, 5.10). The
// references of all devices sum in double, kernels in float32.
#pragma once

#include <array>
#include <cstdint>

#include "quire/base/host_device.h"
#include "quire/format/codec.h"
#include "quire/format/element.h"
#include "quire/spec/problem.h"
#include "quire/spec/scale.h"
#include "quire/spec/scale_index.h"

namespace quire {

/// Elements of the contraction that are summed without scales, at most.
inline constexpr int64_t kLongestCut = 128;

/// An operand of one product, read number by number.
struct OperandValues {
  Operand from;
  int64_t contraction, block, blocks;

  constexpr explicit OperandValues(const Operand& operand)
      : from(operand),
        contraction(operand.contraction),
        block(block_length(operand.spec, operand.contraction)),
        blocks(block_count(operand.spec, operand.contraction)) {}

  constexpr bool has_block_scales() const { return from.spec.row().scope == Scope::block; }
  /// Elements after which sums of codes must be scaled: a power of two.
  constexpr int64_t longest_cut() const { return has_block_scales() && block < kLongestCut ? block : kLongestCut; }

  /// The value of a code, without scales.
  QUIRE_HOST_DEVICE double value(int64_t o, int64_t l) const {
    const int64_t i = data_index({from.spec, from.direction, from.outer, contraction}, o, l);
    const unsigned code = code_at(from.spec, static_cast<const uint8_t*>(from.data), i);
    return static_cast<double>(decode(from.spec.element, static_cast<int>(code)));
  }

  /// The scale of element (o, l), without the constant of product_constant().
  QUIRE_HOST_DEVICE double scale(int64_t o, int64_t l) const {
    const double scale = static_cast<double>(stored_scale(o, l / block));
    if (from.spec.row().scale != ScaleKind::two_level) return scale;
    const double global = static_cast<double>(from.amax[amax_index(from.spec, o)]);
    return from.spec.global == Global::divisor ? scale / global : scale * global;
  }

  /// The part of it that changes along the contraction: what a kernel multiplies the sum of block `b` by.
  QUIRE_HOST_DEVICE float block_scale(int64_t o, int64_t b) const {
    return has_block_scales() ? stored_scale(o, b) : 1.0f;
  }

  /// The part that does not: what a kernel multiplies finished sums by.
  QUIRE_HOST_DEVICE float line_factor(int64_t o) const {
    if (contraction == 0) return 0.0f;
    if (!has_block_scales()) return stored_scale(o, 0);
    return from.spec.row().has_amax ? global_factor(from.amax[amax_index(from.spec, o)], from.spec) : 1.0f;
  }

 private:
  QUIRE_HOST_DEVICE float stored_scale(int64_t o, int64_t b) const {
    const int64_t i = scale_index({from.spec, from.direction, from.outer, blocks}, o, b);
    const ScaleKind kind = from.spec.row().scale;
    if (kind == ScaleKind::f32) return static_cast<const float*>(from.scale)[i];
    const uint8_t byte = static_cast<const uint8_t*>(from.scale)[i];
    return kind == ScaleKind::e8m0 ? e8m0_value(byte) : decode(kBlockScaleFormat, byte);
  }
};

/// What is left of the global scales of NVFP4 operands (numerics.md 5.10).
constexpr float product_constant(const QuantSpec& a, const QuantSpec& b) {
  const auto divisor = [](const QuantSpec& s) {
    return s.row().scale == ScaleKind::two_level ? global_divisor(s) : 1.0f;
  };
  return 1.0f / (divisor(a) * divisor(b));
}

/// Block sums first, then their scales, as the contract orders it; 4-bit block sums are exact this way. Operands are
/// OperandValues, or hold what these would give.
template <class Values>
constexpr double dot(const Values& a, const Values& b, int64_t i, int64_t j) {
  const int64_t step = a.block < b.block ? a.block : b.block;
  double sum = 0;
  for (int64_t begin = 0; begin < a.contraction; begin += step) {
    const int64_t end = begin + step < a.contraction ? begin + step : a.contraction;
    double block_sum = 0;
    for (int64_t l = begin; l < end; ++l) block_sum += a.value(i, l) * b.value(j, l);
    sum += block_sum * (a.scale(i, begin) * b.scale(j, begin));
  }
  return sum;
}

/// A number rounded to a dtype.
QUIRE_HOST_DEVICE inline float rounded(DType dtype, float x) {
  switch (dtype) {
    case DType::f16:
      return f16_to_f32(f32_to_f16(x));
    case DType::bf16:
      return bf16_to_f32(f32_to_bf16(x));
    default:
      return x;
  }
}

/// Where a product goes, and what is added to it.
struct ProductOutput {
  MutableMatrix out;
  Vector bias{};
  const void* addend = nullptr;  ///< as in GemmProblem

  /// One rounding to out's dtype, of a sum with its scales, as double or float.
  template <class Number>
  QUIRE_HOST_DEVICE void store(int64_t i, int64_t j, Number y) const {
    if (bias.data) y += static_cast<Number>(load_element(bias.data, bias.dtype, j));
    const int64_t at = i * out.row_stride + j;
    float result = rounded(out.dtype, static_cast<float>(y));
    if (addend) result += load_element(addend, out.dtype, at);
    store_element(out.data, out.dtype, at, result);
  }
};

/// A plain matrix as an operand of a product whose result has `dtype`, to which its elements are rounded.
struct PlainValues {
  Matrix from;
  bool transposed;
  DType dtype;

  QUIRE_HOST_DEVICE float operator()(int64_t i, int64_t j) const {
    const int64_t at = transposed ? j * from.row_stride + i : i * from.row_stride + j;
    return rounded(dtype, load_element(from.data, from.dtype, at));
  }
};

/// Output (i, j) of a plain product whose terms have this sum, as double or float: the bias has out's dtype, as
/// operands have, and there is no addend.
template <class Number>
QUIRE_HOST_DEVICE void store_plain(const ProductOutput& to, int64_t i, int64_t j, Number sum) {
  if (to.bias.data) sum += static_cast<Number>(rounded(to.out.dtype, load_element(to.bias.data, to.bias.dtype, j)));
  store_element(to.out.data, to.out.dtype, i * to.out.row_stride + j, static_cast<float>(sum));
}

/// Output (i, j) of a plain product, of `length` terms a(i, l) b(l, j); no addend.
template <class A, class B>
QUIRE_HOST_DEVICE void store_matmul(const ProductOutput& to, const A& a, const B& b, int64_t length,
                                    std::array<int64_t, 2> row_and_column) {
  const auto [i, j] = row_and_column;
  double sum = 0;
  for (int64_t l = 0; l < length; ++l) sum += static_cast<double>(a(i, l)) * static_cast<double>(b(l, j));
  store_plain(to, i, j, sum);
}

}  // namespace quire
