// One element of a view, in and out of float32.
#pragma once

#include "quire/base/matrix.h"
#include "quire/format/element.h"

namespace quire {

QUIRE_HOST_DEVICE inline float load_element(const Matrix& m, int64_t row, int64_t col) {
  return load_element(m.data, m.dtype, row * m.row_stride + col);
}
QUIRE_HOST_DEVICE inline float load_element(const Vector& v, int64_t i) { return load_element(v.data, v.dtype, i); }

QUIRE_HOST_DEVICE inline void store_element(const MutableMatrix& m, int64_t row, int64_t col, float value) {
  store_element(m.data, m.dtype, row * m.row_stride + col, value);
}

}  // namespace quire
