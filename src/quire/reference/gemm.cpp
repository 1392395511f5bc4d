#include "quire/reference/gemm.h"

#include <algorithm>
#include <vector>

#include "quire/base/float_mode.h"
#include "quire/format/codec.h"
#include "quire/format/element.h"
#include "quire/spec/scale.h"
#include "quire/spec/scale_index.h"

namespace quire::reference {
namespace {

/// An operand as values [outer, contraction] and scales [outer, blocks], without the constants of alpha().
struct Decoded {
  int64_t contraction, block, blocks;
  std::vector<double> values, scales;

  double value(int64_t o, int64_t l) const { return values[static_cast<size_t>(o * contraction + l)]; }
  double scale(int64_t o, int64_t l) const { return scales[static_cast<size_t>(o * blocks + l / block)]; }
};

double scale_of(const Operand& a, int64_t index, int64_t o) {
  const ScaleKind kind = a.spec.row().scale;
  if (kind == ScaleKind::f32) return static_cast<double>(static_cast<const float*>(a.scale)[index]);
  const uint8_t byte = static_cast<const uint8_t*>(a.scale)[index];
  if (kind == ScaleKind::e8m0) return static_cast<double>(e8m0_value(byte));
  const double scale = static_cast<double>(decode(kBlockScaleFormat, byte));
  const double global = static_cast<double>(a.amax[amax_index(a.spec, o)]);
  return a.spec.global == Global::divisor ? scale / global : scale * global;
}

Decoded decode_operand(const Operand& a) {
  Decoded d{a.contraction, block_length(a.spec, a.contraction), block_count(a.spec, a.contraction), {}, {}};
  if (a.contraction == 0) return d;
  for (int64_t o = 0; o < a.outer; ++o) {
    for (int64_t l = 0; l < a.contraction; ++l) {
      const int64_t i = data_index({a.spec, a.direction, a.outer, a.contraction}, o, l);
      const unsigned code = code_at(a.spec, static_cast<const uint8_t*>(a.data), i);
      d.values.push_back(static_cast<double>(decode(a.spec.element, static_cast<int>(code))));
    }
    for (int64_t b = 0; b < d.blocks; ++b)
      d.scales.push_back(scale_of(a, scale_index({a.spec, a.direction, a.outer, d.blocks}, o, b), o));
  }
  return d;
}

/// numerics.md 5.10: what is left of the global scales of NVFP4 operands.
double alpha(const QuantSpec& a, const QuantSpec& b) {
  float divisor = 1;
  for (const QuantSpec* s : {&a, &b})
    if (s->row().scale == ScaleKind::two_level) divisor *= global_divisor(*s);
  return static_cast<double>(1.0f / divisor);
}

/// Block sums first, then their scales, as the contract orders it; 4-bit block sums are exact this way.
double dot(const Decoded& a, const Decoded& b, int64_t i, int64_t j) {
  const int64_t step = std::min(a.block, b.block);
  double sum = 0;
  for (int64_t begin = 0; begin < a.contraction; begin += step) {
    double block_sum = 0;
    for (int64_t l = begin; l < std::min(begin + step, a.contraction); ++l) block_sum += a.value(i, l) * b.value(j, l);
    sum += block_sum * (a.scale(i, begin) * b.scale(j, begin));
  }
  return sum;
}

/// One rounding to float32 and one to the output's dtype, as a kernel that accumulates in float32 would end.
float round_to(DType dtype, double x) {
  float out = 0;
  store_element(&out, dtype, 0, static_cast<float>(x));
  return load_element(&out, dtype, 0);
}

}  // namespace

void gemm(const GemmProblem& p) {
  FloatMode mode;
  const Decoded a = decode_operand(p.a), b = decode_operand(p.b);
  const double constant = alpha(p.a.spec, p.b.spec);
  for (int64_t i = 0; i < p.out.rows; ++i)
    for (int64_t j = 0; j < p.out.cols; ++j) {
      double y = dot(a, b, i, j) * constant;
      if (p.bias) y += static_cast<double>(load_element(p.bias, p.bias_dtype, j));
      float out = round_to(p.out.dtype, y);
      const int64_t index = i * p.out.row_stride + j;
      if (p.addend) out += load_element(p.addend, p.out.dtype, index);
      store_element(p.out.data, p.out.dtype, index, out);
    }
}

void matmul(const MatmulProblem& p) {
  FloatMode mode;
  const DType dtype = p.out.dtype;
  const auto element = [&](const Matrix& m, bool transpose, int64_t i, int64_t j) {
    const int64_t index = transpose ? j * m.row_stride + i : i * m.row_stride + j;
    return round_to(dtype, static_cast<double>(load_element(m.data, m.dtype, index)));
  };
  const int64_t length = p.transpose_a ? p.a.rows : p.a.cols;
  for (int64_t i = 0; i < p.out.rows; ++i)
    for (int64_t j = 0; j < p.out.cols; ++j) {
      double sum = 0;
      for (int64_t l = 0; l < length; ++l)
        sum += static_cast<double>(element(p.a, p.transpose_a, i, l)) * element(p.b, p.transpose_b, l, j);
      if (p.bias.data) sum += round_to(dtype, static_cast<double>(load_element(p.bias.data, p.bias.dtype, j)));
      store_element(p.out.data, dtype, i * p.out.row_stride + j, static_cast<float>(sum));
    }
}

void column_sum(const ColumnSumProblem& p) {
  FloatMode mode;
  for (int64_t j = 0; j < p.x.cols; ++j) {
    double sum = 0;
    for (int64_t i = 0; i < p.x.rows; ++i)
      sum += static_cast<double>(load_element(p.x.data, p.x.dtype, i * p.x.row_stride + j));
    store_element(p.out, p.out_dtype, j, static_cast<float>(sum));
  }
}

}  // namespace quire::reference
