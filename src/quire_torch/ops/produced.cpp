#include "quire_torch/ops/produced.h"

#include <ATen/ops/zeros.h>

namespace quire_torch {

quire::Destination destination(const ProducedFields& f, at::Tensor* results, int64_t rows, int64_t cols,
                               const char* what) {
  quire::Destination to{
      .y = {f.has_y() ? results[0].mutable_data_ptr() : nullptr, dtype(f.dtype, what), rows, cols, cols}};
  if (!f.quantized()) return to;
  to.spec = *f.spec->spec;
  if (f.rowwise) to.rowwise = side(results[1], results[2], results[3]);
  if (f.columnwise) to.columnwise = side(results[4], results[5], results[6]);
  if (f.scale) {
    quire::check(f.scale->scalar_type() == at::kFloat && f.scale->numel() == 1, what,
                 ": scale must be float32 of size [1], got ", f.scale->scalar_type(), " ", f.scale->sizes());
    to.scale = f.scale->const_data_ptr<float>();
  }
  return to;
}

op::Tensors<7> with_carrier(const ProducedFields& f, at::Tensor* results, c10::SymIntArrayRef sizes) {
  op::Tensors<7> out;
  std::move(results, results + out.size(), out.begin());
  if (!f.has_y()) out[0] = at::zeros({1}, out[0].options()).expand_symint(sizes);
  return out;
}

}  // namespace quire_torch
