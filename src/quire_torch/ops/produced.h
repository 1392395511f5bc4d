// A result that an operator gives as it is, quantized, or both: y and the six buffers of a quantized tensor.
#pragma once

#include "quire/spec/pointwise_problem.h"
#include "quire_torch/ops/operand.h"
#include "quire_torch/ops/quantize.h"

namespace quire_torch {

/// What is wanted of a result. Without a spec, y; with one, its buffers, and y too if `keep`.
struct ProducedFields {
  at::ScalarType dtype;
  OptionalSpecText spec = OptionalSpecText::parse("");
  bool rowwise = false, columnwise = false, keep = false;
  std::optional<at::Tensor> scale{};  ///< float32 [1]: a static scale (numerics.md 1.5)

  bool quantized() const { return spec->has_value(); }
  bool has_y() const { return keep || !quantized(); }
};

inline constexpr std::array kProducedResults = before_buffers("y");

/// y of these sizes and its buffers, where they are wanted. A y that is not is one zero, for with_carrier().
template <class Int>
std::array<op::Result<Int>, 7> produced_results(const ProducedFields& f, const quire::Shape<Int>& sizes,
                                                const char* what) {
  check_result_dtype(f.dtype, what, ": dtype");
  quire::check(f.quantized() == (f.rowwise || f.columnwise), what,
               f.quantized() ? ": rowwise and columnwise are both False; ask for at least one direction of the spec"
                             : ": a direction is asked for without a spec; pass both or neither");
  op::Result<Int> y{{Int(1)}, f.dtype};
  if (f.has_y()) {
    y.sizes.clear();
    y.sizes.append(sizes.begin(), sizes.end());
  }
  const quire::QuantSpec spec = f.spec->value_or(quire::QuantSpec{});
  const auto r = results(spec, sizes, quire::Direction::rowwise, f.rowwise), c = kept(spec, sizes, f.columnwise);
  return {y, r[0], r[1], r[2], c[0], c[1], c[2]};
}

/// Sets the one element of a y that is not wanted.
void clear_carrier(const ProducedFields& f, at::Tensor& y);

/// Where a kernel puts it: the first seven results, of which y is [..., cols] in `rows` rows.
quire::Destination destination(const ProducedFields& f, at::Tensor* results, int64_t rows, int64_t cols,
                               const char* what);

/// The seven results with a carrier for a y that is not wanted: a tensor of y's sizes over one element, which is never
/// read and takes the gradient. The element is the inner operator's, since Inductor would compute a constant in full.
op::Tensors<7> with_carrier(const ProducedFields& f, at::Tensor* results, c10::SymIntArrayRef sizes);

}  // namespace quire_torch
