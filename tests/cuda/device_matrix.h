// Inputs of tests (quire/inputs.h) in memory of the CUDA device.
#pragma once

#include <cstring>

#include "cuda/twins.h"
#include "quire/inputs.h"

namespace quire::testing {

/// A copy of a matrix with its padding; `lead` as in InputShape.
inline MutableMatrix on_device(Twins& twins, const Input& input, int64_t lead = 0) {
  const Matrix m = input;
  const int64_t width = size_of(m.dtype), bytes = m.rows * m.row_stride * width;
  auto* const to = twins.room<std::byte>(lead * width + bytes) + lead * width;
  std::memcpy(to, m.data, static_cast<size_t>(bytes));
  return {to, m.dtype, m.rows, m.cols, m.row_stride};
}
inline MutableMatrix on_device(Twins& twins, const InputShape& shape, DType dtype, Kind kind, uint64_t seed) {
  return on_device(twins, Input(shape, dtype, kind, seed), shape.lead);
}

/// All of its memory, padding included.
inline Written written(const char* what, const MutableMatrix& m) {
  const std::optional<DType> floats = m.dtype == DType::u8 ? std::nullopt : std::optional(m.dtype);
  return {what, m.data, m.rows * m.row_stride * size_of(m.dtype), floats};
}

}  // namespace quire::testing
