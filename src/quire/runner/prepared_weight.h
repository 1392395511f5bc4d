// A weight that is kept quantized and multiplied many times.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "quire/runner/arena.h"
#include "quire/spec/linear_spec.h"
#include "quire/spec/pointwise_problem.h"

namespace quire {

/// What belongs to a weight.
struct WeightOptions {
  Vector bias{};  ///< [N]
  /// A static scale of the weight's input x, which is then not measured. Positive and finite. Under NVFP4 it is
  /// amax / (6 * 448) of the values it was calibrated on (numerics.md 5.9), and 2688 times it is finite too. Under
  /// fp8_tensor and under the options `given` and `global` it is what the spec stores (2.5, 5.9, 5.11).
  std::optional<float> input_scale{};
};

/// Codes and scales of w [N, K], and a bias [N], in memory of its own: later writes to what it was made from change
/// nothing. Immutable. Codes are interleaved, which products of few tokens read soonest (numerics.md 2.4), unless
/// scales are swizzled.
class PreparedWeight {
 public:
  /// Quantizes w (f32, f16 or bf16). Throws Error if the spec rounds stochastically, or as quire::quantize does.
  PreparedWeight(const Matrix& w, const QuantSpec& spec, const WeightOptions& options = {});
  /// Copies a rowwise operand. Throws Error if it is columnwise or lacks memory.
  explicit PreparedWeight(const Operand& w, const WeightOptions& options = {});

  int64_t out_features() const { return operand_.outer; }
  int64_t in_features() const { return operand_.contraction; }
  /// As given.
  const QuantSpec& spec() const { return spec_; }

  /// Throws Error unless inputs of this weight can be quantized so: deterministically, and with an input_scale under
  /// one scale of the tensor, which the option `given` needs. Inputs that are not quantized have no input_scale.
  void check_input_spec(const InputSpec& x) const;
  /// Where the result that is its input goes, to be quantized into `codes`.
  Destination destination(const MutableMatrix& y, const QuantSpec& x, const Side& codes) const;

  /// The quantization of an input x [T, K] into codes.
  QuantizeProblem quantization(const Matrix& x, const QuantSpec& spec, const Side& codes) const;
  /// out [T, N] = x w^T + bias (numerics.md 7.4, 6.6); x the rowwise codes of a [T, K]. name: for observers.
  GemmProblem product(const Side& x, const QuantSpec& spec, const MutableMatrix& out, const char* name = "") const;
  /// The same of an x that is not quantized, with the decoded w (numerics.md 6.12), whose memory is an arena of its
  /// own: that of the largest weight serves all that are multiplied one after another.
  void multiply(const Matrix& x, const MutableMatrix& out, Context context) const;

 private:
  PreparedWeight(const QuantSpec& spec, int64_t rows, int64_t cols);
  /// x with the option `given`, where the input_scale is what that stores.
  QuantSpec input_spec(const QuantSpec& x) const;
  /// The amax that inputs are quantized under; null if it is measured, or a scale is given.
  const float* input_amax(const QuantSpec& x) const;
  void keep(const WeightOptions& options);

  QuantSpec spec_;
  std::unique_ptr<Arena> memory_;
  Operand operand_;
  std::vector<float> bias_;
  std::optional<float> input_scale_;
  /// The amaxes of inputs that a static scale stands for, by the largest scale of a block, 256 or 448.
  struct InputAmax {
    float of_256, of_448;
  };
  std::optional<InputAmax> input_amax_;
};

}  // namespace quire
