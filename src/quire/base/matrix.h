// Views of memory that somebody else owns.
#pragma once

#include <cstdint>

#include "quire/base/dtype.h"

namespace quire {

/// A read-only row-major matrix [rows, cols]: unit column stride, any row stride (in elements; 0 repeats one row).
struct Matrix {
  const void* data = nullptr;
  DType dtype = DType::f32;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t row_stride = 0;
};

/// The same, writable.
struct MutableMatrix {
  void* data = nullptr;
  DType dtype = DType::f32;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t row_stride = 0;

  constexpr operator Matrix() const { return {data, dtype, rows, cols, row_stride}; }
};

/// f32, f16 or bf16, one element per column of a matrix; data == nullptr: absent.
struct Vector {
  const void* data = nullptr;
  DType dtype = DType::f32;
};

/// Integers of a tensor: int32, or int64 where `wide`.
struct Integers {
  const void* data = nullptr;
  int64_t count = 0;
  bool wide = false;

  /// The i-th. Follows `data`: for kernels.
  int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

}  // namespace quire
