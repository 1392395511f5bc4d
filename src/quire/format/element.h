// One element of plain memory, of any floating dtype, in and out of float32.
#pragma once

#include <cstdint>

#include "quire/base/dtype.h"
#include "quire/base/host_device.h"
#include "quire/format/half.h"

namespace quire {

/// Element `index` of an array of f32, f16 or bf16, widened exactly.
QUIRE_HOST_DEVICE inline float load_element(const void* data, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::f16:
      return f16_to_f32(static_cast<const uint16_t*>(data)[index]);
    case DType::bf16:
      return bf16_to_f32(static_cast<const uint16_t*>(data)[index]);
    default:
      return static_cast<const float*>(data)[index];
  }
}

/// Rounds to nearest even once; nothing to round for f32.
QUIRE_HOST_DEVICE inline void store_element(void* data, DType dtype, int64_t index, float value) {
  switch (dtype) {
    case DType::f16:
      static_cast<uint16_t*>(data)[index] = f32_to_f16(value);
      break;
    case DType::bf16:
      static_cast<uint16_t*>(data)[index] = f32_to_bf16(value);
      break;
    default:
      static_cast<float*>(data)[index] = value;
  }
}

}  // namespace quire
