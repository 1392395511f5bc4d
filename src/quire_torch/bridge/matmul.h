// Lends PyTorch's products of plain matrices to the core.
#pragma once

namespace quire_torch {

/// Makes the core's host kernels multiply plain matrices by at::mm.
void install_matmul();

}  // namespace quire_torch
