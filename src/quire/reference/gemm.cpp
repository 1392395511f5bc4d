#include "quire/reference/gemm.h"

#include <vector>

#include "quire/base/float_mode.h"
#include "quire/format/element.h"
#include "quire/spec/product.h"

namespace quire::reference {
namespace {

/// An operand whose numbers are decoded once.
struct Decoded {
  int64_t contraction, block, blocks;
  std::vector<double> values, scales;

  double value(int64_t o, int64_t l) const { return values[static_cast<size_t>(o * contraction + l)]; }
  double scale(int64_t o, int64_t l) const { return scales[static_cast<size_t>(o * blocks + l / block)]; }
};

Decoded decode_operand(const Operand& a) {
  const OperandValues from(a);
  Decoded d{from.contraction, from.block, from.blocks, {}, {}};
  if (a.contraction == 0) return d;
  for (int64_t o = 0; o < a.outer; ++o) {
    for (int64_t l = 0; l < a.contraction; ++l) d.values.push_back(from.value(o, l));
    for (int64_t b = 0; b < d.blocks; ++b) d.scales.push_back(from.scale(o, b * d.block));
  }
  return d;
}

}  // namespace

void gemm(const GemmProblem& p) {
  FloatMode mode;
  const Decoded a = decode_operand(p.a), b = decode_operand(p.b);
  const double constant = static_cast<double>(product_constant(p.a.spec, p.b.spec));
  const ProductOutput to{p.out, {p.bias, p.bias_dtype}, p.addend};
  for (int64_t i = 0; i < p.out.rows; ++i)
    for (int64_t j = 0; j < p.out.cols; ++j) to.store(i, j, dot(a, b, i, j) * constant);
}

void matmul(const MatmulProblem& p) {
  FloatMode mode;
  const DType dtype = p.out.dtype;
  const PlainValues a{p.a, p.transpose_a, dtype}, b{p.b, p.transpose_b, dtype};
  const ProductOutput to{p.out, p.bias};
  const int64_t length = p.transpose_a ? p.a.rows : p.a.cols;
  for (int64_t i = 0; i < p.out.rows; ++i)
    for (int64_t j = 0; j < p.out.cols; ++j) store_matmul(to, a, b, length, {i, j});
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
