// Products for both rows of cuBLASLt: outputs, what is added to them, and how far they may be off.
#pragma once

#include <cmath>

#include "cuda/cublaslt_case.h"

namespace quire::testing {

/// What a product is added to, and in which dtype.
struct Variant {
  DType dtype;
  bool bias = false;
  enum { none, other, out } addend = none;
};
inline constexpr std::array kVariants{
    Variant{DType::f32},
    Variant{DType::f32, true},
    Variant{DType::f32, true, Variant::other},
    Variant{DType::f32, false, Variant::out},
    Variant{DType::bf16, true},
    Variant{DType::f16, true},
    Variant{DType::f16},
};

/// An output whose rows begin at multiples of 16 bytes, with or without gaps.
inline Output aligned_output(LtCases& cases, DType dtype, int64_t rows, int64_t cols) {
  const int64_t stride = cols + 16 * static_cast<int64_t>(cases.die(2));
  Output o = cases.output(dtype, rows, stride);
  o.out.cols = cols, o.out.row_stride = stride;
  return o;
}

/// The dtype that a bias has where codes are multiplied, and where they are decoded first.
inline DType bias_dtype(DType out, bool in_bf16) { return !in_bf16 && out == DType::f32 ? DType::bf16 : out; }

inline GemmProblem problem_of(LtCases& cases, const std::array<Operand, 2>& operands, const Variant& v,
                              bool in_bf16 = false) {
  const auto& [a, b] = operands;
  const Output o = aligned_output(cases, v.dtype, a.outer, b.outer);
  GemmProblem p{.a = a, .b = b, .out = o.out};
  if (v.bias) {
    const Vector bias = cases.vector(bias_dtype(v.dtype, in_bf16), b.outer);
    p.bias = bias.data, p.bias_dtype = bias.dtype;
  }
  if (v.addend == Variant::out) p.addend = o.out.data;
  if (v.addend == Variant::other) p.addend = cases.output(v.dtype, a.outer, o.out.row_stride).out.data;
  return p;
}

/// What was added to each output, and the outputs themselves.
inline std::vector<double> contents(const void* data, const MutableMatrix& m) {
  std::vector<double> all;
  for (int64_t i = 0; data && i < m.rows; ++i)
    for (int64_t j = 0; j < m.cols; ++j)
      all.push_back(static_cast<double>(load_element(data, m.dtype, i * m.row_stride + j)));
  return all;
}

/// The bound that numerics.md 7.6 gives a row, relative to the magnitudes of all terms. The stand-in rounds nothing but
/// its result, so that it has the bound of 7.5 and a mistake cannot hide.
inline double relative_bound(std::string_view row, int64_t contraction) {
  const auto k = static_cast<double>(contraction);
  if (!on_gpu()) return (k + 8) * 0x1p-24;
  return row == "cublaslt" ? 0x1p-11 + (k + 8) * 0x1p-24 : (18 * std::ceil(k / 8) + 8) * 0x1p-24;
}

/// Runs the row; each output must be within its bound.
inline void expect_bound(LtCases& cases, const GemmProblem& p, std::string_view row = "cublaslt") {
  SCOPED_TRACE(text(to_string(p), " to ", name(p.out.dtype), p.bias ? ", bias" : "", p.addend ? ", addend" : ""));
  const std::vector<double> addends = contents(p.addend, p.out);
  cases.run(p, row);
  const std::vector<double> found = contents(p.out.data, p.out);
  const double relative = relative_bound(row, p.a.contraction);
  const double rounding = p.out.dtype == DType::f32 ? 0x1p-24 : p.out.dtype == DType::bf16 ? 0x1p-8 : 0x1p-11;
  const OperandReader a{p.a}, b{p.b};
  for (int64_t i = 0; i < p.out.rows; ++i)
    for (int64_t j = 0; j < p.out.cols; ++j) {
      const auto at = static_cast<size_t>(i * p.out.cols + j);
      const double bias = p.bias ? static_cast<double>(load_element(p.bias, p.bias_dtype, j)) : 0;
      double sum = bias, magnitude = std::fabs(bias);
      if (p.addend) sum += addends[at], magnitude += std::fabs(addends[at]);
      for (int64_t l = 0; l < p.a.contraction; ++l) {
        const double product = a.value(i, l) * b.value(j, l);
        sum += product, magnitude += std::fabs(product);
      }
      ASSERT_LE(std::fabs(found[at] - sum), relative * magnitude + rounding * std::fabs(sum) + 0x1p-25)
          << "at " << i << ", " << j << ": " << found[at] << " instead of " << sum;
    }
  cases.compared += p.out.rows * p.out.cols;
}

/// What one row says of products: each rule of it is broken alone.
class LtRefusals : public LtCases {
 public:
  using LtCases::LtCases;

  Operand operand(const char* spec, int64_t outer = 32, int64_t length = 128, Direction d = kRows) {
    return d == kRows ? ProductCases::operand(spec, d, outer, length) : ProductCases::operand(spec, d, length, outer);
  }
  GemmProblem problem(const Operand& a, const Operand& b, DType dtype = DType::f32) {
    return problem_of(*this, {a, b}, {dtype});
  }
  GemmProblem problem(const char* a, const char* b) { return problem(operand(a), operand(b)); }
  void expect(const Machine& machine, const GemmProblem& p, std::string_view why) {
    pretend(machine);
    EXPECT_EQ(refusal(p), why);
  }
};

}  // namespace quire::testing
