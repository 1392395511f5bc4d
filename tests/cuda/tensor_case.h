// Products of codes by tensor cores: what each output may be, in double from codes and scales.
#pragma once

#include <algorithm>
#include <map>

#include "cuda/product_case.h"

namespace quire::testing {

inline constexpr double kRounding = 0x1p-24;

/// How many roundings of kRounding, of all magnitudes together, an output of a row may be off by (numerics.md 7.5).
inline double tensor_bound(std::string_view row, int64_t contraction) {
  const int64_t steps = ceil_div(contraction, int64_t{8});
  if (row == "pipelined_bf16") return static_cast<double>(18 * steps + 6);
  return static_cast<double>(18 * std::min<int64_t>(steps, 16) + ceil_div(contraction, int64_t{128}) + 6);
}

/// What an output may be.
struct ProductLimits {
  double value = 0, off = 0;
  double magnitude = 0;  ///< of all terms together
  bool beyond = false;   ///< an operand has a value that float32 does not
};

/// One step of rounding to a dtype: half a place of a number of this magnitude.
inline double half_a_place(DType dtype, double magnitude) {
  if (dtype == DType::f32) return magnitude * 0x1p-24 + 0x1p-149;
  return dtype == DType::f16 ? magnitude * 0x1p-11 + 0x1p-25 : magnitude * 0x1p-8 + 0x1p-134;
}

/// The lines of an operand in double.
inline std::vector<double> values_of(const Operand& o) {
  std::vector<double> all;
  for (int64_t i = 0; i < o.outer; ++i)
    for (int64_t l = 0; l < o.contraction; ++l) all.push_back(OperandReader{o}.value(i, l));
  return all;
}

/// A line of each operand, in double.
struct Terms {
  const double* a;
  const double* b;
};

/// `bound`: of roundings.
inline ProductLimits limits_of(const GemmProblem& p, double bound, const Terms& terms, int64_t i, int64_t j) {
  const auto& [a, b] = terms;
  ProductLimits out;
  for (int64_t l = 0; l < p.a.contraction; ++l) {
    out.value += a[l] * b[l], out.magnitude += std::fabs(a[l] * b[l]);
    out.beyond |= std::max(std::fabs(a[l]), std::fabs(b[l])) > static_cast<double>(kFloatMax);
  }
  const double bias = p.bias ? static_cast<double>(load_element(p.bias, p.bias_dtype, j)) : 0;
  out.value += bias, out.magnitude += std::fabs(bias);
  out.off = bound * kRounding * out.magnitude;
  out.off += half_a_place(p.out.dtype, std::fabs(out.value) + out.off);
  if (!p.addend) return out;
  out.value += static_cast<double>(load_element(p.addend, p.out.dtype, i * p.out.row_stride + j));
  out.off += half_a_place(p.out.dtype, std::fabs(out.value) + out.off);
  return out;
}

/// What an output was off by, at most: so many roundings of all magnitudes together.
inline double worst = 0;

/// Runs a row of tensor cores: outputs are within their limits, and everything else is what the contract says, which is
/// zero or as it was.
inline void expect_within(ProductCases& cases, const GemmProblem& p, const Output& o, std::string_view row) {
  SCOPED_TRACE(text(to_string(p), " to ", name(p.out.dtype), " by ", row));
  auto* const begin = static_cast<char*>(o.out.data);
  const std::string before(begin, static_cast<size_t>(o.bytes));
  std::map<const char*, ProductLimits> limits;
  each_group_by(p, [&](const GemmProblem& q) {
    const std::vector<double> a = values_of(q.a), b = values_of(q.b);
    for (int64_t i = 0; i < q.out.rows; ++i)
      for (int64_t j = 0; j < q.out.cols; ++j)
        limits[static_cast<const char*>(q.out.data) + (i * q.out.row_stride + j) * size_of(q.out.dtype)] =
            limits_of(q, tensor_bound(row, q.a.contraction),
                      {a.data() + i * q.a.contraction, b.data() + j * q.a.contraction}, i, j);
  });
  const std::string rest(begin, static_cast<size_t>(o.bytes));
  std::memcpy(begin, before.data(), before.size());
  cases.run(p, row);
  each_number(o, limits, rest, [&](const ProductLimits& limit, double y, int64_t at) {
    const auto& [value, off, magnitude, beyond] = limit;
    ++cases.compared;
    if (beyond && !std::isfinite(y)) return;
    if (!std::isfinite(value)) {
      ASSERT_TRUE(std::isnan(value) ? std::isnan(y) : y == value) << y << " instead of " << value;
    } else if (std::fabs(value) + off < 65504) {
      ASSERT_LE(std::fabs(y - value), off)
          << y << " instead of " << value << ", element " << at << " of rows of " << o.out.row_stride;
      if (o.out.dtype == DType::f32 && !p.addend && magnitude > 0)
        worst = std::max(worst, std::fabs(y - value) / (magnitude * kRounding));
    }
  });
}

}  // namespace quire::testing
