#include "quire_torch/ops/produced.h"

namespace quire_torch {

void clear_carrier(const ProducedFields& f, at::Tensor& y) {
  if (!f.has_y()) y.zero_();
}

quire::Destination destination(const ProducedFields& f, at::Tensor* results, int64_t rows, int64_t cols,
                               const char* what) {
  quire::Destination to{
      .y = {f.has_y() ? results[0].mutable_data_ptr() : nullptr, dtype(f.dtype, what), rows, cols, cols}};
  clear_carrier(f, results[0]);
  if (!f.quantized()) return to;
  to.spec = **f.spec;
  if (f.rowwise) to.rowwise = side(results[1], results[2], results[3]);
  if (f.columnwise) to.columnwise = side(results[4], results[5], results[6]);
  to.scale = given_scale(f.scale, what, ": scale");
  return to;
}

op::Tensors<7> with_carrier(const ProducedFields& f, at::Tensor* results, c10::SymIntArrayRef sizes) {
  op::Tensors<7> out;
  std::move(results, results + out.size(), out.begin());
  if (!f.has_y()) out[0] = out[0].expand_symint(sizes);
  return out;
}

}  // namespace quire_torch
