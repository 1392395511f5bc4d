#include "quire/runner/prepared_weight.h"

#include <array>
#include <cstring>

#include "quire/base/check.h"
#include "quire/format/element.h"
#include "quire/gemm/gemm.h"
#include "quire/quantize/quantize.h"
#include "quire/quantize/reorder.h"

namespace quire {

Operand rowwise_operand(const Side& side, const QuantSpec& spec, int64_t rows, int64_t cols) {
  return {.spec = spec,
          .direction = Direction::rowwise,
          .outer = rows,
          .contraction = cols,
          .data = side.data,
          .scale = side.scale,
          .amax = side.amax};
}

PreparedWeight::PreparedWeight(const QuantSpec& spec, int64_t rows, int64_t cols)
    : spec_(spec), memory_(std::make_unique<Arena>()) {
  check(rows >= 1 && cols >= 1, "runner: a weight must be [out_features, in_features] with at least one of each; got [",
        rows, ", ", cols, "]");
  check(!spec.stochastic, "runner: weight spec ", spec.to_string(),
        " rounds stochastically, which is for gradients; leave sr out");
  const QuantSpec kept = spec.interleaved || spec.swizzled ? spec : spec.reordered();
  operand_ = rowwise_operand(memory_->take_rowwise(kept, rows, cols), kept, rows, cols);
}

PreparedWeight::PreparedWeight(const Matrix& w, const QuantSpec& spec, const Vector& bias)
    : PreparedWeight(spec, w.rows, w.cols) {
  const Side side{const_cast<void*>(operand_.data), const_cast<void*>(operand_.scale),
                  const_cast<float*>(operand_.amax)};
  quantize({.spec = operand_.spec, .x = w, .rowwise = side, .columnwise = {}, .random = {}});
  keep_bias(bias);
}

PreparedWeight::PreparedWeight(const Operand& w, const Vector& bias) : PreparedWeight(w.spec, w.outer, w.contraction) {
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
  keep_bias(bias);
}

void PreparedWeight::keep_bias(const Vector& bias) {
  if (bias.data == nullptr) return;
  for (int64_t i = 0; i < out_features(); ++i) bias_.push_back(load_element(bias.data, bias.dtype, i));
}

void PreparedWeight::multiply(const Operand& x, const MutableMatrix& out) const {
  gemm({.a = x, .b = operand_, .out = out, .bias = bias_.empty() ? nullptr : bias_.data(), .bias_dtype = DType::f32});
}

Operand quantize_rowwise(const Matrix& x, const QuantSpec& spec, Arena& arena) {
  const Side side = arena.take_rowwise(spec, x.rows, x.cols);
  quantize({.spec = spec, .x = x, .rowwise = side, .columnwise = {}, .random = {}});
  return rowwise_operand(side, spec, x.rows, x.cols);
}

}  // namespace quire
