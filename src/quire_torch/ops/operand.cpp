#include "quire_torch/ops/operand.h"

#include "quire/quantize/quantize.h"
#include "quire_torch/ops/recorder.h"

namespace quire_torch {

using quire::Direction;

BufferTensors quantize_operand(const at::Tensor& t, const QuantizeRole& q, const quire::Context& context,
                               BufferTensors into) {
  const BufferTensors fresh = allocate(q.spec, t, q.rowwise && !into[0].defined(), q.columnwise && !into[3].defined());
  for (size_t i = 0; i < into.size(); ++i)
    if (!into[i].defined()) into[i] = fresh[i];
  const MatrixView x(t, q.what);
  quire::quantize({.spec = q.spec,
                   .x = x.matrix(),
                   .rowwise = q.rowwise ? side(into, Direction::rowwise) : quire::Side{},
                   .columnwise = q.columnwise ? side(into, Direction::columnwise) : quire::Side{},
                   .random = q.random,
                   .scale = q.scale ? given_scale(*q.scale, q.what, "'s scale") : nullptr,
                   .role = q.role},
                  context);
  record_operand(q.role, q.spec, t.sizes(), into);
  return into;
}

BufferTensors given_operand(const op::OptionalTensorList& buffers, const quire::Shape<int64_t>& shape,
                            const QuantizeRole& q) {
  BufferTensors b;
  quire::check(buffers.size() == b.size(), q.what, "'s buffers must be the six of quire.TensorProto, got ",
               buffers.size());
  for (size_t i = 0; i < b.size(); ++i)
    if (buffers[i]) b[i] = *buffers[i];
  if (q.rowwise) check_buffers(b, q.spec, shape, Direction::rowwise, q.what);
  if (q.columnwise) check_buffers(b, q.spec, shape, Direction::columnwise, q.what);
  // Those that are for backward are not refused as late as there.
  if (!q.columnwise && b[3].defined() && b[3].numel() > 0) check_saved(b, q.spec, shape, q.what);
  record_operand(q.role, q.spec, at::IntArrayRef(shape), b);
  return b;
}

void check_saved(const BufferTensors& b, const quire::QuantSpec& spec, const quire::Shape<int64_t>& shape,
                 const char* what) {
  const auto expected = results(spec, shape, Direction::columnwise, true);
  for (size_t i = 0; i < expected.size(); ++i) {
    const at::Tensor& t = b[3 + i];
    const int64_t count = c10::multiply_integers(sizes(expected[i]));
    const bool absent = count == 0 && (!t.defined() || t.numel() == 0);
    if (absent || (t.defined() && t.scalar_type() == expected[i].dtype && t.is_contiguous() && t.numel() == count))
      continue;
    quire::fail(what, " does not fit its spec: ", quire::kBufferNames[3 + i], " of ", spec.to_string(), " for shape ",
                at::IntArrayRef(shape), " must hold ", count, " contiguous ", expected[i].dtype, ", got ",
                t.defined() ? quire::text(t.scalar_type(), " ", t.sizes()) : "nothing", "; see quire.TensorProto");
  }
}

quire::Operand operand(const BufferTensors& b, const quire::QuantSpec& spec, Direction direction, int64_t rows,
                       int64_t cols) {
  const quire::Side s = side(b, direction);
  const bool rowwise = direction == Direction::rowwise;
  return {.spec = spec,
          .direction = direction,
          .outer = rowwise ? rows : cols,
          .contraction = rowwise ? cols : quire::columnwise_tokens(spec, rows),
          .data = s.data,
          .scale = s.scale,
          .amax = s.amax};
}

}  // namespace quire_torch
