// A weight that is kept quantized and multiplied many times.
#pragma once

#include <memory>
#include <vector>

#include "quire/runner/arena.h"
#include "quire/spec/pointwise_problem.h"

namespace quire {

/// Codes and scales of w [N, K], and a bias [N], in memory of its own: later writes to what it was made from change
/// nothing. Immutable. Codes are interleaved, which products of few tokens read soonest (numerics.md 2.4), unless
/// scales are swizzled.
class PreparedWeight {
 public:
  /// Quantizes w (f32, f16 or bf16). Throws Error if the spec rounds stochastically, or as quire::quantize does.
  PreparedWeight(const Matrix& w, const QuantSpec& spec, const Vector& bias = {});
  /// Copies a rowwise operand. Throws Error if it is columnwise or lacks memory.
  explicit PreparedWeight(const Operand& w, const Vector& bias = {});

  int64_t out_features() const { return operand_.outer; }
  int64_t in_features() const { return operand_.contraction; }
  /// As given.
  const QuantSpec& spec() const { return spec_; }

  /// out [T, N] = x w^T + bias (numerics.md 7.4, 6.6); x a rowwise [T, K].
  void multiply(const Operand& x, const MutableMatrix& out) const;

 private:
  PreparedWeight(const QuantSpec& spec, int64_t rows, int64_t cols);
  void keep_bias(const Vector& bias);

  QuantSpec spec_;
  std::unique_ptr<Arena> memory_;
  Operand operand_;
  std::vector<float> bias_;
};

/// Rowwise buffers of a quantized [rows, cols] as an operand.
Operand rowwise_operand(const Side& side, const QuantSpec& spec, int64_t rows, int64_t cols);

/// Quantizes x [T, K] rowwise into memory of the arena.
Operand quantize_rowwise(const Matrix& x, const QuantSpec& spec, Arena& arena);

}  // namespace quire
