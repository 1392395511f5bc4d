#include "quire/runner/prepared_weight.h"

#include <array>
#include <cmath>
#include <cstring>

#include "quire/base/check.h"
#include "quire/format/element.h"
#include "quire/gemm/gemm.h"
#include "quire/quantize/quantize.h"
#include "quire/quantize/reorder.h"

namespace quire {
namespace {

/// The amax that an input_scale of 1 stands for.
constexpr float kAmaxOfOne = 6 * 448;

/// The buffers of a quantized [rows, cols] as an operand.
Operand rowwise_operand(const Side& side, const QuantSpec& spec, int64_t rows, int64_t cols) {
  return {.spec = spec,
          .direction = Direction::rowwise,
          .outer = rows,
          .contraction = cols,
          .data = side.data,
          .scale = side.scale,
          .amax = side.amax};
}

}  // namespace

PreparedWeight::PreparedWeight(const QuantSpec& spec, int64_t rows, int64_t cols)
    : spec_(spec), memory_(std::make_unique<Arena>()) {
  check(rows >= 1 && cols >= 1, "runner: a weight must be [out_features, in_features] with at least one of each; got [",
        rows, ", ", cols, "]");
  check(!spec.stochastic, "runner: weight spec ", spec.to_string(),
        " rounds stochastically, which is for gradients; leave sr out");
  const QuantSpec kept = spec.interleaved || spec.swizzled ? spec : spec.reordered();
  operand_ = rowwise_operand(memory_->take_rowwise(kept, rows, cols), kept, rows, cols);
}

PreparedWeight::PreparedWeight(const Matrix& w, const QuantSpec& spec, const WeightOptions& options)
    : PreparedWeight(spec, w.rows, w.cols) {
  const Side side{const_cast<void*>(operand_.data), const_cast<void*>(operand_.scale),
                  const_cast<float*>(operand_.amax)};
  quantize({.spec = operand_.spec, .x = w, .rowwise = side, .columnwise = {}, .random = {}});
  keep(options);
}

PreparedWeight::PreparedWeight(const Operand& w, const WeightOptions& options)
    : PreparedWeight(w.spec, w.outer, w.contraction) {
  check(w.direction == Direction::rowwise,
        "runner: a weight must be given by its rowwise codes; got columnwise ones; quantize it with rowwise=True");
  const auto bytes = rowwise_bytes(w.spec, w.outer, w.contraction);
  const std::array<const void*, 3> from{w.data, w.scale, w.amax}, to{operand_.data, operand_.scale, operand_.amax};
  for (size_t i = 0; i < bytes.size(); ++i) {
    check(from[i] != nullptr || bytes[i] == 0, "runner: ", kBufferNames[i], " of the weight is a null pointer; give ",
          bytes[i], " bytes for ", w.spec.to_string(), " [", w.outer, ", ", w.contraction, "]");
    // The amax is the same in both orders.
    if (bytes[i] > 0 && (i == 2 || w.spec == operand_.spec))
      std::memcpy(const_cast<void*>(to[i]), from[i], static_cast<size_t>(bytes[i]));
  }
  if (w.spec != operand_.spec)
    reorder({.from = w, .data = const_cast<void*>(operand_.data), .scale = const_cast<void*>(operand_.scale)});
  keep(options);
}

void PreparedWeight::keep(const WeightOptions& options) {
  const Vector& bias = options.bias;
  for (int64_t i = 0; bias.data != nullptr && i < out_features(); ++i)
    bias_.push_back(load_element(bias.data, bias.dtype, i));
  if (!options.input_scale) return;
  const float s = *options.input_scale;
  check(s > 0 && std::isfinite(s), "runner: an input_scale must be positive and finite; got ", s,
        "; give amax / (6 * 448) of the calibration, or its reciprocal if you have 6 * 448 / amax");
  input_scale_ = s;
  input_amax_ = {s * (6.0f * 256), s * kAmaxOfOne};
}

void PreparedWeight::check_input_spec(const InputSpec& input) const {
  check(input || !input_scale_,
        "runner: an input_scale is one of activations that are quantized; got x=none; leave the input_scale out");
  if (!input) return;
  const QuantSpec& x = *input;
  check(!x.stochastic, "runner: activation spec ", x, " rounds stochastically, which is for gradients; leave sr out");
  check(!x.interleaved, "runner: activation spec ", x, " is interleaved, which is for weights; leave interleaved out");
  check(!x.given || input_scale_, "runner: activation spec ", x,
        " has its scale from the caller, and there is no input_scale; give one, or leave 'given' out");
  if (!input_scale_) return;
  const bool f32 = x.row().scope == Scope::tensor, two = x.row().scale == ScaleKind::two_level && !x.row_scaled;
  check((f32 && !x.pow2 && x.epsilon == 0) || two,
        "runner: an input_scale is one of activations with one scale of the tensor; got x=", x,
        "; leave the input_scale out, or take x=nvfp4 or x=fp8_tensor");
  check(input_spec(x).given || std::isfinite(*input_scale_ * kAmaxOfOne),
        "runner: 2688 times an input_scale must be positive and finite; got ", *input_scale_,
        "; give amax / (6 * 448) of the calibration, or its reciprocal if you have 6 * 448 / amax");
}

QuantSpec PreparedWeight::input_spec(const QuantSpec& x) const {
  QuantSpec spec = x;
  spec.given = x.given || (input_scale_ && (x.row().scope == Scope::tensor || x.global != Global::amax));
  if (spec.given) spec.hadamard = Hadamard::off;  // of columnwise codes only
  return spec;
}

const float* PreparedWeight::input_amax(const QuantSpec& x) const {
  if (!input_amax_ || input_spec(x).given) return nullptr;
  return x.block_scale_max() == 256 ? &input_amax_->of_256 : &input_amax_->of_448;
}

QuantizeProblem PreparedWeight::quantization(const Matrix& x, const QuantSpec& spec, const Side& codes) const {
  const QuantSpec used = input_spec(spec);
  return {.spec = used,
          .x = x,
          .rowwise = codes,
          .columnwise = {},
          .random = {},
          .scale = used.given ? &*input_scale_ : nullptr,
          .amax = {.rowwise = input_amax(spec)},
          .role = "x"};
}

Destination PreparedWeight::destination(const MutableMatrix& y, const QuantSpec& x, const Side& codes) const {
  const QuantSpec used = input_spec(x);
  return {.y = y,
          .spec = used,
          .rowwise = codes,
          .scale = used.given ? &*input_scale_ : nullptr,
          .amax = {.rowwise = input_amax(x)}};
}

GemmProblem PreparedWeight::product(const Side& x, const QuantSpec& spec, const MutableMatrix& out,
                                    const char* name) const {
  return {.a = rowwise_operand(x, spec, out.rows, in_features()),
          .b = operand_,
          .out = out,
          .bias = bias_.empty() ? nullptr : bias_.data(),
          .bias_dtype = DType::f32,
          .role = {name, "x", "w"}};
}

void PreparedWeight::multiply(const Matrix& x, const MutableMatrix& out, Context context) const {
  const HeldArena memory;
  context.workspace = &*memory;
  matmul({.a = x,
          .b = {},
          .transpose_b = true,
          .bias = {bias_.empty() ? nullptr : bias_.data(), DType::f32},
          .out = out,
          .codes = operand_},
         context);
}

}  // namespace quire
