// Weights that are kept quantized and multiplied many times.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "quire/runner/call_memory.h"
#include "quire/runner/storage.h"
#include "quire/spec/linear_spec.h"
#include "quire/spec/pointwise_problem.h"

namespace quire {

/// What belongs to a weight, or to E of them.
struct WeightOptions {
  int64_t count = 1;  ///< E
  Vector bias{};      ///< [E, N], one after another, where the weight's values lie
  /// A static scale of the weight's input x, which is then not measured: none, one, or one for each of the E. Positive
  /// and finite. Under NVFP4 it is amax / (6 * 448) of the values it was calibrated on (numerics.md 5.9), and 2688
  /// times it is finite too. Under fp8_tensor and under the options `given` and `global` it is what the spec stores
  /// (2.5, 5.9, 5.11).
  std::vector<float> input_scales{};
};

/// Codes and scales of w [N, K], or of E such weights, one of which each group of rows is multiplied by; and biases.
/// In memory of its own: later writes to what it was made from change nothing. Only take() changes it. Codes are
/// interleaved, which products of few tokens read soonest (numerics.md 2.4), unless scales are swizzled.
class PreparedWeight {
 public:
  /// Quantizes w [E * N, K] (f32, f16 or bf16) where it lies. Throws Error if the spec rounds stochastically, or as
  /// quire::quantize does.
  PreparedWeight(const Matrix& w, const QuantSpec& spec, const WeightOptions& options = {},
                 const Storage& storage = host_storage());
  /// Copies a rowwise operand [E * N, K], which has `each` if E is not 1. Throws Error if it is columnwise or lacks
  /// memory.
  explicit PreparedWeight(const Operand& w, const WeightOptions& options = {}, const Storage& storage = host_storage());

  int64_t count() const { return count_; }
  int64_t out_features() const { return operand_.outer / count_; }
  int64_t in_features() const { return operand_.contraction; }
  /// As given.
  const QuantSpec& spec() const { return spec_; }
  /// Where it lies: "cpu", "cuda:0".
  const std::string& place() const { return place_; }

  /// Throws Error unless take() of the other one changes values only: the same sizes, spec, place, and dtype of the
  /// bias. what: for errors, such as "w13".
  void check_taken(const PreparedWeight& other, const char* what) const;
  /// Copies codes, scales and bias of one that check_taken() passes into the memory that this one has. Static scales of
  /// inputs stay, unless the other one has some.
  void take(const PreparedWeight& other, const Storage& storage);

  /// Throws Error unless inputs of this weight can be quantized so: deterministically, and with an input_scale under
  /// one scale of the tensor, which the option `given` needs. Inputs that are not quantized have no input_scale.
  void check_input_spec(const InputSpec& x) const;
  /// Throws Error unless codes of a token of such inputs do not depend on the other tokens.
  void check_tokens_alone(const InputSpec& x) const;
  /// Where the result that is its input goes, to be quantized into `codes`.
  Destination destination(const MutableMatrix& y, const QuantSpec& x, const RowCodes& codes) const;

  /// The quantization of an input x [T, K] into codes.
  QuantizeProblem quantization(const Matrix& x, const QuantSpec& spec, const RowCodes& codes) const;
  /// out [T, N] = x w^T + bias (numerics.md 7.4, 6.6); x the codes of a [T, K]. name: for observers.
  GemmProblem product(const RowCodes& x, const QuantSpec& spec, const MutableMatrix& out, const char* name = "") const;
  /// The same of an x that is not quantized, with the decoded w (numerics.md 6.12).
  MatmulProblem plain_product(const Matrix& x, const RowGroups& groups, const MutableMatrix& out) const;

 private:
  PreparedWeight(const QuantSpec& spec, const std::array<int64_t, 2>& sizes, const WeightOptions& options,
                 const Storage& storage);
  /// x with the option `given`, where the input_scale is what that stores.
  QuantSpec input_spec(const QuantSpec& x) const;
  /// The amaxes that inputs are quantized under; null if they are measured, or scales are given.
  const float* input_amax(const QuantSpec& x) const;
  /// Where the side of one of the weights is written.
  Side written(int64_t weight) const;
  void keep(const WeightOptions& options, const Storage& storage);
  void keep_scales(const std::vector<float>& scales, const Storage& storage);

  QuantSpec spec_;
  int64_t count_;
  std::string place_;
  std::shared_ptr<void> codes_, bias_memory_, scales_memory_;
  int64_t codes_bytes_ = 0;
  Operand operand_;
  Vector bias_;
  float largest_scale_ = 0;  ///< of input_scales_; 0: there are none
  const float* input_scales_ = nullptr;
  /// The amaxes of inputs that static scales stand for, by the largest scale of a block, 256 or 448.
  struct InputAmaxes {
    const float *of_256 = nullptr, *of_448 = nullptr;
  } input_amaxes_;
};

}  // namespace quire
