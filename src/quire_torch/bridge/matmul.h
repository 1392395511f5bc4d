// Lends PyTorch's products of plain matrices to the core.
#pragma once

namespace quire_torch {

/// Makes kernels multiply plain matrices by at::mm, on any device.
void install_matmul();

}  // namespace quire_torch
