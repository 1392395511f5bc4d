// Plain products on the CUDA device: what each output may be, in double from the numbers that operands are rounded to.
#pragma once

#include <algorithm>
#include <map>

#include "cuda/product_case.h"

namespace quire::testing {

/// The operands of one product as numbers of the result's dtype; weights that a row multiplies exactly as they are.
struct PlainReader {
  const MatmulProblem& p;
  bool exact_weights = false;

  double a(int64_t i, int64_t l) const { return number(p.a, p.transpose_a ? l : i, p.transpose_a ? i : l); }
  double b(int64_t l, int64_t j) const {
    const int64_t row = p.transpose_b ? j : l, col = p.transpose_b ? l : j;
    return exact_weights ? static_cast<double>(load_element(p.b.data, p.b.dtype, row * p.b.row_stride + col))
                         : number(p.b, row, col);
  }
  double bias(int64_t j) const { return p.bias.data ? in_dtype(load_element(p.bias.data, p.bias.dtype, j)) : 0; }
  int64_t contraction() const { return p.transpose_a ? p.a.rows : p.a.cols; }

 private:
  double number(const Matrix& m, int64_t i, int64_t j) const {
    return in_dtype(load_element(m.data, m.dtype, i * m.row_stride + j));
  }
  double in_dtype(float x) const {
    float rounded = 0;
    store_element(&rounded, p.out.dtype, 0, x);
    return static_cast<double>(load_element(&rounded, p.out.dtype, 0));
  }
};

inline Matrix rows_of(Matrix m, int64_t begin, int64_t rows) {
  m.data = static_cast<const std::byte*>(m.data) + begin * m.row_stride * size_of(m.dtype), m.rows = rows;
  return m;
}
inline MutableMatrix rows_of(MutableMatrix m, int64_t begin, int64_t rows) {
  m.data = static_cast<std::byte*>(m.data) + begin * m.row_stride * size_of(m.dtype), m.rows = rows;
  return m;
}

/// Calls one(product of plain matrices) for each group that has rows. The CPU decodes weights in codes, to float32 if
/// they are exact.
template <class One>
void each_matmul(const MatmulProblem& p, const One& one, bool exact_weights = false) {
  const int64_t count = p.groups.count;
  Matrix b = p.b;
  std::vector<std::byte> memory;
  if (p.codes) {
    const int64_t rows = p.codes->rows(), cols = p.codes->cols();
    const DType dtype = exact_weights ? DType::f32 : p.out.dtype;
    memory.resize(static_cast<size_t>(rows * cols * size_of(dtype)));
    const MutableMatrix decoded{memory.data(), dtype, rows, cols, cols};
    dispatch(DequantizeProblem{.spec = p.codes->spec,
                               .rows = rows,
                               .cols = cols,
                               .data = p.codes->data,
                               .scale = p.codes->scale,
                               .amax = p.codes->amax,
                               .out = decoded,
                               .groups = p.codes->groups,
                               .room = p.codes->room},
             host());
    b = decoded;
  }
  for (int64_t e = 0; e < count; ++e) {
    const auto end = [&](int64_t g) {
      return g < 0 ? 0 : p.groups.ends.data ? p.groups.ends[g] : (g + 1) * (p.a.rows / count);
    };
    const int64_t begin = end(e - 1), rows = end(e) - begin;
    if (rows == 0 && count > 1) continue;
    MatmulProblem q;
    q.a = rows_of(p.a, begin, rows), q.transpose_a = p.transpose_a, q.transpose_b = p.transpose_b;
    q.b = !p.bs.empty()   ? p.bs[e]
          : p.transpose_a ? rows_of(b, begin, rows)
                          : rows_of(b, e * (b.rows / count), b.rows / count);
    q.out = !p.outs.empty() ? p.outs[e]
            : p.transpose_a ? rows_of(p.out, e * p.a.cols, p.a.cols)
                            : rows_of(p.out, begin, rows);
    q.bias = p.biases.empty() ? p.bias : p.biases[e];
    if (p.bias.data) q.bias.data = static_cast<const std::byte*>(p.bias.data) + e * p.out.cols * size_of(p.bias.dtype);
    one(q);
  }
}

/// How the products of each_grouped() differ: dtypes of the result, of x, of weights in one matrix and in a list;
/// whether weights lie as those of a Linear; whether weights in one matrix have a bias, and their gradients are a list.
struct GroupedForm {
  DType out, x, weights, listed;
  bool transposed, biased;
};

/// Calls check(problem, output) for products of groups whose ends are on the device: with weights in one matrix and in
/// a list, and the gradient of weights.
template <class Check>
void each_grouped(ProductCases& cases, const Grouping& g, const GroupedForm& form, const Check& check) {
  const auto count = std::ssize(g.ends);
  const Output y = cases.output(form.out, kTokens, kOutputs);
  const auto weights = [&](DType dtype, int64_t several) {
    return form.transposed ? cases.matrix(dtype, several * kOutputs, kInputs)
                           : cases.matrix(dtype, several * kInputs, kOutputs);
  };
  MatmulProblem p{.a = cases.matrix(form.x, kTokens, kInputs),
                  .b = weights(form.weights, count),
                  .transpose_b = form.transposed,
                  .out = y.out,
                  .groups = cases.groups(g.ends, kTokens, g.wide)};
  if (form.biased) p.bias = cases.vector(DType::f16, count * kOutputs);
  check(p, y);
  std::vector<Matrix> list;
  std::vector<Vector> biases;
  for (int64_t e = 0; e < count; ++e) {
    list.push_back(weights(form.listed, 1));
    biases.push_back(cases.vector(DType::bf16, kOutputs));
  }
  MatmulProblem lists = p;
  lists.bs = list, lists.bias = {}, lists.biases = biases;
  check(lists, y);
  const Output dw = cases.output(form.out, count * kOutputs, kInputs, form.biased ? count : 0);
  check({.a = cases.matrix(DType::bf16, kTokens, kOutputs),
         .b = cases.matrix(DType::bf16, kTokens, kInputs),
         .transpose_a = true,
         .out = dw.out,
         .groups = p.groups,
         .outs = dw.each},
        dw);
}

/// What an output may be.
struct PlainLimits {
  double value = 0, off = 0;
};

/// Whether a row multiplies the numbers of codes without rounding them to the result's dtype (numerics.md 7.7).
inline bool has_exact_weights(std::string_view row) { return row == "skinny"; }

/// How many roundings of 2^-24, of all magnitudes together, a row may be off by (numerics.md 7.5): weights in float32
/// have three of their own.
inline double plain_bound(std::string_view row, int64_t contraction) {
  if (row == "tiles32") return static_cast<double>(contraction + 6);
  if (row == "pipelined") return static_cast<double>(18 * ceil_div(contraction, int64_t{8}) + 6);
  return static_cast<double>(18 * std::min<int64_t>(ceil_div(contraction, int64_t{8}), 16) +
                             ceil_div(contraction, int64_t{128}) + 6 + (has_exact_weights(row) ? 3 : 0));
}

inline PlainLimits limits_of(const MatmulProblem& q, std::string_view row, int64_t i, int64_t j) {
  const PlainReader read{q, has_exact_weights(row)};
  double sum = read.bias(j), magnitude = std::fabs(sum);
  for (int64_t l = 0; l < read.contraction(); ++l) {
    const double term = read.a(i, l) * read.b(l, j);
    sum += term, magnitude += std::fabs(term);
  }
  const double off = plain_bound(row, read.contraction()) * 0x1p-24 * magnitude, most = std::fabs(sum) + off;
  const double half = q.out.dtype == DType::f32   ? most * 0x1p-24 + 0x1p-149
                      : q.out.dtype == DType::f16 ? most * 0x1p-11 + 0x1p-25
                                                  : most * 0x1p-8 + 0x1p-134;
  return {sum, off + half};
}

/// Runs a row: outputs are within their limits, and everything else is what the CPU leaves there.
inline void expect_within(ProductCases& cases, const MatmulProblem& p, const Output& o, std::string_view row) {
  SCOPED_TRACE(text(to_string(p), " to ", name(p.out.dtype), " by ", row));
  auto* const begin = static_cast<char*>(o.out.data);
  const std::string before(begin, static_cast<size_t>(o.bytes));
  std::map<const char*, PlainLimits> limits;
  const int64_t width = size_of(o.out.dtype);
  const auto put_limits = [&](const MatmulProblem& q) {
    for (int64_t i = 0; i < q.out.rows; ++i)
      for (int64_t j = 0; j < q.out.cols; ++j)
        limits[static_cast<const char*>(q.out.data) + (i * q.out.row_stride + j) * width] = limits_of(q, row, i, j);
  };
  each_matmul(p, put_limits, has_exact_weights(row));
  dispatch(p, host());
  const std::string rest(begin, static_cast<size_t>(o.bytes));
  std::memcpy(begin, before.data(), before.size());
  cases.run(p, row);
  each_number(o, limits, rest, [&](const PlainLimits& limit, double y, int64_t at) {
    const auto& [value, off] = limit;
    ++cases.compared;
    if (!std::isfinite(value))
      ASSERT_TRUE(std::isnan(value) ? std::isnan(y) : y == value) << y << " instead of " << value;
    else
      ASSERT_LE(std::fabs(y - value), off)
          << y << " instead of " << value << ", element " << at << " of rows of " << o.out.row_stride;
  });
}

}  // namespace quire::testing
