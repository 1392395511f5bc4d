// A vector as kernels access memory.
#pragma once

#include <cstdint>

namespace quire::cuda {

/// Elements that a thread loads or stores together.
inline constexpr int64_t kVector = 8;

}  // namespace quire::cuda
