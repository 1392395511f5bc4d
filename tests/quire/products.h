// Operands of products and what a product of them may be off by.
#pragma once

#include <memory>
#include <optional>

#include "inputs.h"
#include "quantized.h"

namespace quire::testing {

struct ProductShape {
  int64_t m, n, k;
};

/// A quantized tensor seen as an operand of [outer, contraction].
struct OwnedOperand {
  std::unique_ptr<Quantized> tensor;
  Direction direction;

  Operand view() const { return tensor->operand(direction); }
};

struct OperandOptions {
  Direction direction = Direction::rowwise;
  Kind kind = Kind::normal;
  uint64_t seed = 1;
};

/// Quantizes a random tensor with the reference. A transformed direction contracts whole groups of 16 tokens.
inline OwnedOperand random_operand(const QuantSpec& spec, int64_t outer, int64_t contraction,
                                   const OperandOptions& options) {
  const bool columnwise = options.direction == Direction::columnwise;
  const InputShape shape = columnwise ? InputShape{contraction, outer} : InputShape{outer, contraction};
  const Input x(shape, DType::f32, options.kind, options.seed);
  Quantized q = quantized(reference_runner(), spec, x, {.directions = {!columnwise, columnwise}});
  return {std::make_unique<Quantized>(std::move(q)), options.direction};
}

/// Where a product goes, and what is added to it.
struct Epilogue {
  DType out = DType::f32;
  std::optional<DType> bias;
  bool addend = false;
  int64_t padding = 0;  ///< elements between rows of out
};

/// Memory of a product's output and of what is added to it; gaps between rows hold a pattern.
class Product {
 public:
  Product(const Operand& a, const Operand& b, const Epilogue& e, uint64_t seed = 1)
      : a_(a),
        b_(b),
        epilogue_(e),
        stride_(b.outer + e.padding),
        out_(a.outer * stride_ * size_of(e.out)),
        bias_(b.outer * 4),
        addend_(a.outer * stride_ * size_of(e.out)) {
    Random r(seed);
    for (int64_t j = 0; e.bias && j < b.outer; ++j)
      store_element(bias_.data(), *e.bias, j, static_cast<float>(r.normal() * 3));
    for (int64_t i = 0; e.addend && i < a.outer * stride_; ++i)
      store_element(addend_.data(), e.out, i, static_cast<float>(r.normal() * 3));
  }

  GemmProblem problem() {
    return {.a = a_,
            .b = b_,
            .out = {out_.data(), epilogue_.out, a_.outer, b_.outer, stride_},
            .bias = epilogue_.bias ? bias_.data() : nullptr,
            .bias_dtype = epilogue_.bias.value_or(DType::f32),
            .addend = epilogue_.addend ? addend_.data() : nullptr};
  }

  void run(const Runner& runner) {
    runner.run.gemm(problem());
    EXPECT_TRUE(out_.intact()) << "wrote outside of out";
  }

  const Guarded& out() const { return out_; }
  float at(int64_t i, int64_t j) const { return load_element(out_.data(), epilogue_.out, i * stride_ + j); }
  double bias(int64_t j) const {
    return epilogue_.bias ? static_cast<double>(load_element(bias_.data(), *epilogue_.bias, j)) : 0;
  }
  double addend(int64_t i, int64_t j) const {
    return epilogue_.addend ? static_cast<double>(load_element(addend_.data(), epilogue_.out, i * stride_ + j)) : 0;
  }

 private:
  Operand a_, b_;
  Epilogue epilogue_;
  int64_t stride_;
  Guarded out_, bias_, addend_;
};

/// sum_l |a[i, l] * b[j, l]| in double, [a.outer, b.outer].
inline std::vector<double> magnitudes(const OwnedOperand& a, const OwnedOperand& b) {
  const std::vector<float> x = dequantized(reference_runner(), *a.tensor, a.direction);
  const std::vector<float> y = dequantized(reference_runner(), *b.tensor, b.direction);
  const int64_t m = a.view().outer, n = b.view().outer, k = a.view().contraction;
  std::vector<double> out;
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0;
      for (int64_t l = 0; l < k; ++l)
        sum += std::fabs(static_cast<double>(x[static_cast<size_t>(i * k + l)]) *
                         static_cast<double>(y[static_cast<size_t>(j * k + l)]));
      out.push_back(sum);
    }
  return out;
}

inline std::string product_text(const Operand& a, const Operand& b) {
  return to_string(GemmProblem{.a = a, .b = b, .out = {}});
}

}  // namespace quire::testing
