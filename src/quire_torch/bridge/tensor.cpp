#include "quire_torch/bridge/tensor.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>

namespace quire_torch {

using quire::check, quire::fail;

at::ScalarType scalar_type(quire::DType t) {
  switch (t) {
    case quire::DType::u8:
      return at::kByte;
    case quire::DType::f32:
      return at::kFloat;
    case quire::DType::f16:
      return at::kHalf;
    case quire::DType::bf16:
      return at::kBFloat16;
  }
  quire::fail("internal error: unknown dtype; please report it");
}

quire::DType dtype(at::ScalarType t, const char* what) {
  switch (t) {
    case at::kByte:
      return quire::DType::u8;
    case at::kFloat:
      return quire::DType::f32;
    case at::kHalf:
      return quire::DType::f16;
    case at::kBFloat16:
      return quire::DType::bf16;
    default:
      quire::fail(what, " must be float32, float16 or bfloat16, got ", t, "; convert it with .to()");
  }
}

void check_input(const at::Tensor& t, const char* what) {
  check(dtype(t.scalar_type(), what) != quire::DType::u8, what, " must be float32, float16 or bfloat16, got ",
        t.scalar_type(), "; convert it with .to()");
  check(t.dim() >= 1, what, " must have at least 1 dimension, got a scalar; use .reshape(1)");
  check(t.layout() == at::kStrided, what, " must be a dense tensor, got layout ", t.layout(), "; use .to_dense()");
}

namespace {

/// Row stride of t as [M, K], or -1 if its dimensions cannot be flattened to one row stride.
int64_t row_stride(const at::Tensor& t) {
  const int64_t rank = t.dim();
  if (t.size(rank - 1) > 1 && t.stride(rank - 1) != 1) return -1;
  int64_t stride = t.size(rank - 1), expected = -1;
  for (int64_t d = rank - 2; d >= 0; --d) {
    if (t.size(d) == 1) continue;
    if (expected < 0)
      stride = t.stride(d);
    else if (t.stride(d) != expected)
      return -1;
    expected = t.stride(d) * t.size(d);
  }
  return stride;
}

}  // namespace

bool MatrixView::takes(const at::Tensor& t) { return row_stride(t) >= 0; }

MatrixView::MatrixView(const at::Tensor& t, const char* what) : holder_(t) {
  int64_t stride = row_stride(t);
  if (stride < 0) {
    holder_ = t.contiguous();
    stride = t.size(-1);
  }
  const int64_t cols = t.size(-1);
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < t.dim(); ++d) rows = quire::times(rows, t.size(d));
  matrix_ = {holder_.const_data_ptr(), dtype(t.scalar_type(), what), rows, cols, stride};
}

template <class Int>
quire::Shape<Int> shape(const at::Tensor& t) {
  const auto s = op::sizes<Int>(t);
  return {s.begin(), s.end()};
}
template quire::Shape<int64_t> shape(const at::Tensor&);
template quire::Shape<c10::SymInt> shape(const at::Tensor&);

at::Tensor tensor_over(const void* data, at::IntArrayRef sizes, at::ScalarType dtype, at::Device device) {
  return at::for_blob(const_cast<void*>(data), sizes)
      .options(at::device(device).dtype(dtype))
      .target_device(device)
      .make_tensor();
}

at::Tensor tensor_over(const quire::Matrix& m, at::Device device) {
  const std::array<int64_t, 2> sizes{m.rows, m.cols}, strides{m.row_stride, 1};
  return at::for_blob(const_cast<void*>(m.data), sizes)
      .strides(strides)
      .options(at::device(device).dtype(scalar_type(m.dtype)))
      .target_device(device)
      .make_tensor();
}

quire::MutableMatrix mutable_matrix(at::Tensor& t) {
  const int64_t cols = t.size(-1);
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < t.dim(); ++d) rows = quire::times(rows, t.size(d));
  return {t.mutable_data_ptr(), dtype(t.scalar_type(), "result"), rows, cols, cols};
}

quire::Integers integers(const at::Tensor& t) { return {t.const_data_ptr(), t.numel(), t.scalar_type() == at::kLong}; }

namespace {

/// The bytes of its storage from a tensor's first element to its last.
std::pair<int64_t, int64_t> extent(const at::Tensor& t) {
  const int64_t begin = t.storage_offset() * t.element_size();
  if (t.numel() == 0) return {begin, begin};
  int64_t last = 0;
  for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
  return {begin, begin + (last + 1) * t.element_size()};
}

}  // namespace

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  for (const at::Tensor* t : {&a, &b})
    if (!t->defined() || !t->has_storage() || t->unsafeGetTensorImpl()->has_symbolic_sizes_strides()) return false;
  if (!a.storage().is_alias_of(b.storage())) return false;
  const auto [a_begin, a_end] = extent(a);
  const auto [b_begin, b_end] = extent(b);
  return std::max(a_begin, b_begin) < std::min(a_end, b_end);
}

const float* given_scale(const std::optional<at::Tensor>& scale, const char* what, const char* name) {
  if (!scale) return nullptr;
  check(scale->scalar_type() == at::kFloat && scale->numel() == 1, what, name, " must be float32 of size [1], got ",
        scale->scalar_type(), " ", scale->sizes(), "; it multiplies before the cast");
  return scale->const_data_ptr<float>();
}

namespace {

template <class Int>
op::Result<Int> result(const quire::Buffer<Int>& b) {
  op::Result<Int> r{{}, scalar_type(b.dtype)};
  r.sizes.append(b.sizes.begin(), b.sizes.end());
  return r;
}

}  // namespace

template <class Int>
std::array<op::Result<Int>, 3> results(const quire::QuantSpec& spec, const quire::Shape<Int>& shape,
                                       quire::Direction direction, bool wanted) {
  const auto b = wanted ? quire::buffers(spec, shape, direction) : quire::Buffers<Int>{};
  return {result(b.data), result(b.scale), result(b.amax)};
}
template std::array<op::Result<int64_t>, 3> results(const quire::QuantSpec&, const quire::Shape<int64_t>&,
                                                    quire::Direction, bool);
template std::array<op::Result<c10::SymInt>, 3> results(const quire::QuantSpec&, const quire::Shape<c10::SymInt>&,
                                                        quire::Direction, bool);

quire::Side side(const at::Tensor& data, const at::Tensor& scale, const at::Tensor& amax) {
  const auto empty = [](const at::Tensor& t) { return !t.defined() || t.numel() == 0; };
  // The codes of a tensor [0] are [0] too, and its amax is there.
  if (!data.defined() || (data.dim() == 1 && data.size(0) == 0 && empty(scale) && empty(amax))) return {};
  return present_side(data, scale, amax);
}

quire::Side present_side(const at::Tensor& data, const at::Tensor& scale, const at::Tensor& amax) {
  // An empty tensor has no memory; a side is present by its pointer, so give it one that is never read.
  static char nothing;
  void* p = data.numel() ? data.mutable_data_ptr() : &nothing;
  return {p, scale.mutable_data_ptr(), amax.defined() && amax.numel() ? amax.mutable_data_ptr<float>() : nullptr};
}

quire::Side side(const BufferTensors& b, quire::Direction direction) {
  const size_t i = quire::first_buffer(direction);
  return side(b[i], b[i + 1], b[i + 2]);
}

BufferTensors allocate(const quire::QuantSpec& spec, const at::Tensor& t, bool rowwise, bool columnwise) {
  BufferTensors out;
  const auto sizes = shape<int64_t>(t);
  for (const auto direction : {quire::Direction::rowwise, quire::Direction::columnwise}) {
    if (!(direction == quire::Direction::rowwise ? rowwise : columnwise)) continue;
    const auto r = results(spec, sizes, direction, /*wanted=*/true);
    for (size_t i = 0; i < 3; ++i)
      if (i < 2 || spec.row().has_amax)
        out[quire::first_buffer(direction) + i] = op::allocate(r[i].sizes, at::device(t.device()).dtype(r[i].dtype));
  }
  return out;
}

void check_buffers(const BufferTensors& b, const quire::QuantSpec& spec, const quire::Shape<int64_t>& shape,
                   quire::Direction direction, const char* what) {
  const size_t first = quire::first_buffer(direction);
  const auto expected = results(spec, shape, direction, true);
  for (size_t i = 0; i < 3; ++i) {
    const at::Tensor& t = b[first + i];
    const op::Result<int64_t>& e = expected[i];
    const bool unread = i == 2 && spec.row().scale != quire::ScaleKind::two_level;
    const bool absent = (unread || sizes(e) == at::IntArrayRef({0})) && (!t.defined() || t.numel() == 0);
    const bool fits = t.defined() && t.scalar_type() == e.dtype && t.sizes() == sizes(e) && t.is_contiguous();
    if (absent || fits) continue;  // formatting costs more than a small product
    fail(what, " does not fit its spec: ", quire::kBufferNames[first + i], " of ", spec.to_string(), " for shape ",
         at::IntArrayRef(shape), " must be contiguous ", e.dtype, " ", sizes(e), ", got ",
         t.defined() ? quire::text(t.scalar_type(), " ", t.sizes()) : "nothing",
         "; see quire.TensorProto for the layout");
  }
}

}  // namespace quire_torch
