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

}  // namespace quire
