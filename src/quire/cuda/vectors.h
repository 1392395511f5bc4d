// What rows ask of matrices that their kernels read by 16 bytes.
#pragma once

#include <string_view>

#include "quire/base/kernel_table.h"
#include "quire/base/matrix.h"
#include "quire/cuda/kernels/vector.h"

namespace quire::cuda {

bool is_aligned(const void* data);

/// Whether kernels of vectors cannot take a matrix.
bool refuses_vectors(std::string_view what, const Matrix& m, DType dtype, Refusal* refusal);

}  // namespace quire::cuda
