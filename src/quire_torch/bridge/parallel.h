// Lends PyTorch's thread pool to the core.
#pragma once

namespace quire_torch {

/// Makes the core run on at::parallel_for: as many threads as torch.get_num_threads(), inline when already inside a
/// parallel region. From now on a fork ends the forking thread's OpenMP workers first.
void install_executor();

}  // namespace quire_torch
