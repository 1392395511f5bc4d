// at::Tensor <-> the core's views, and the core's layouts <-> operator results.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>

#include "quire/base/check.h"
#include "quire/base/matrix.h"
#include "quire/spec/buffers.h"
#include "quire/spec/moe_problem.h"
#include "quire/spec/problem.h"
#include "quire_torch/op/outputs.h"

namespace quire_torch {

/// A quantized tensor's buffers in the order of quire::kBufferNames; an absent one is undefined or of size [0].
using BufferTensors = std::array<at::Tensor, 6>;

/// Throws unless `t` is dense, on one of f32, f16, bf16 and has rank >= 1; `what` is "op: argument".
void check_input(const at::Tensor& t, const char* what);

/// Throws unless a and b are one device; `what`, in parts, is "op: arguments".
template <class... What>
void check_one_device(c10::Device a, c10::Device b, const What&... what) {
  quire::check(a == b, what..., " must be on one device; got ", a, " and ", b,
               a.is_meta() || b.is_meta() ? op::kInsteadOfMeta : "; move one with .to()");
}

at::ScalarType scalar_type(quire::DType t);
/// f32, f16, bf16 or u8; throws for others, naming `what`.
quire::DType dtype(at::ScalarType t, const char* what);

/// Throws unless results can have this dtype, f32, f16 or bf16; `what`, in parts, is "op: argument".
template <class... What>
void check_result_dtype(at::ScalarType t, const What&... what) {
  quire::check(t == at::kFloat || t == at::kHalf || t == at::kBFloat16, what...,
               " must be float32, float16 or bfloat16, got ", t, "; pass one of these");
}

/// A tensor seen as the matrix [M, K] with K its last dimension. Holds a contiguous copy where the strides do not allow
/// it.
class MatrixView {
 public:
  MatrixView(const at::Tensor& t, const char* what);
  /// Whether the strides allow it.
  static bool takes(const at::Tensor& t);
  const quire::Matrix& matrix() const { return matrix_; }

 private:
  at::Tensor holder_;
  quire::Matrix matrix_;
};

/// Memory of a problem seen as a contiguous tensor of the device where it lies, which does not own it.
at::Tensor tensor_over(const void* data, at::IntArrayRef sizes, at::ScalarType dtype, at::Device device);
/// The same of a matrix, with its row stride.
at::Tensor tensor_over(const quire::Matrix& m, at::Device device);

/// A contiguous tensor seen as a writable [M, K].
quire::MutableMatrix mutable_matrix(at::Tensor& t);

/// A contiguous int32 or int64 tensor.
quire::Integers integers(const at::Tensor& t);

/// Whether two tensors reach into the same bytes of one storage. Strided ones count with what lies between their
/// elements; tensors whose sizes are not known yet do not overlap.
bool overlap(const at::Tensor& a, const at::Tensor& b);

/// Its sizes.
template <class Int>
quire::Shape<Int> shape(const at::Tensor& t);

/// The three results of one direction; absent ones where `wanted` is false.
template <class Int>
std::array<op::Result<Int>, 3> results(const quire::QuantSpec& spec, const quire::Shape<Int>& shape,
                                       quire::Direction direction, bool wanted);

/// The value of a scale that a caller gave, float32 [1], which multiplies before the cast; null if there is none.
/// Throws if it is something else: `what` followed by `name` is the argument, for the error.
const float* given_scale(const std::optional<at::Tensor>& scale, const char* what, const char* name);

inline at::IntArrayRef sizes(const op::Result<int64_t>& r) { return {r.sizes.data(), r.sizes.size()}; }

/// The core's view of three buffers; absent where data is undefined or empty and `present` is false.
quire::Side side(const at::Tensor& data, const at::Tensor& scale, const at::Tensor& amax);
/// The same for buffers that are present, also if they are empty.
quire::Side present_side(const at::Tensor& data, const at::Tensor& scale, const at::Tensor& amax);
quire::Side side(const BufferTensors& b, quire::Direction direction);

/// Allocates the buffers of the wanted directions of t, where t lies.
BufferTensors allocate(const quire::QuantSpec& spec, const at::Tensor& t, bool rowwise, bool columnwise);

/// Throws unless the three buffers are those of `spec` and `shape` in that direction: dtype, sizes, contiguous. `what`
/// is "op: argument".
void check_buffers(const BufferTensors& b, const quire::QuantSpec& spec, const quire::Shape<int64_t>& shape,
                   quire::Direction direction, const char* what);

}  // namespace quire_torch
