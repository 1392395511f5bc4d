#include "quire_torch/ops/operand.h"

namespace quire_torch {

using quire::Direction;

BufferTensors given_buffers(const op::OptionalTensorList& buffers, const Stored& stored, const char* what) {
  BufferTensors b;
  quire::check(buffers.size() == b.size(), what, "'s buffers must be the six of quire.TensorProto, got ",
               buffers.size());
  for (size_t i = 0; i < b.size(); ++i)
    if (buffers[i]) b[i] = *buffers[i];
  check_buffers(b, stored.spec, stored.shape, stored.direction, what);
  // Those that are for backward are not refused as late as there.
  if (stored.direction == Direction::rowwise && b[3].defined() && b[3].numel() > 0)
    check_saved({b[3], b[4], b[5]}, {stored.spec, Direction::columnwise, stored.shape}, what);
  return b;
}

void check_saved(const std::array<at::Tensor, 3>& three, const Stored& stored, const char* what) {
  const auto expected = results(stored.spec, stored.shape, stored.direction, true);
  for (size_t i = 0; i < expected.size(); ++i) {
    const at::Tensor& t = three[i];
    const quire::Shape<int64_t> sizes(expected[i].sizes.begin(), expected[i].sizes.end());
    const int64_t count = quire::product(sizes, 0, sizes.size());
    const bool absent = count == 0 && (!t.defined() || t.numel() == 0);
    if (absent || (t.defined() && t.scalar_type() == expected[i].dtype && t.is_contiguous() && t.numel() == count))
      continue;
    quire::fail(what, " does not fit its spec: ", quire::kBufferNames[quire::first_buffer(stored.direction) + i],
                " of ", stored.spec.to_string(), " for shape ", at::IntArrayRef(stored.shape), " must hold ", count,
                " contiguous ", expected[i].dtype, ", got ",
                t.defined() ? quire::text(t.scalar_type(), " ", t.sizes()) : "nothing", "; see quire.TensorProto");
  }
}

}  // namespace quire_torch
