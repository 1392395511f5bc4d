#include "quire/cuda/vectors.h"

namespace quire::cuda {

bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

bool refuses_vectors(std::string_view what, const Matrix& m, DType dtype, Refusal* refusal) {
  if (m.dtype != dtype)
    return refused(refusal, "takes matrices of one dtype, but one is ", name(dtype), " and ", what, " ", name(m.dtype));
  if (m.cols % kVector != 0)
    return refused(refusal, "takes multiples of ", kVector, " columns, but ", what, " has ", m.cols);
  if (!is_aligned(m.data) || (m.rows > 1 && m.row_stride * size_of(m.dtype) % 16 != 0))
    return refused(refusal, "takes rows that begin at multiples of 16 bytes, but those of ", what, " do not");
  return m.rows * (m.cols / kVector) > INT32_MAX &&
         refused(refusal, "takes fewer than 2^34 elements, but ", what, " has ", m.rows * m.cols);
}

}  // namespace quire::cuda
