// Pages of 2 MiB for results.
#pragma once

#include <cstdint>

namespace quire {

/// Asks the system to back `bytes` of fresh memory with pages of 2 MiB where it has them (madvise). The first touch of
/// each page of 4 KiB costs more than writing it: the gradient of a 4096 x 4096 weight in bfloat16 has 8192 of them, and
/// PyTorch returns so large a tensor to the system in every step. Memory below 4 MiB, which allocators keep, is left
/// alone.
void ask_for_huge_pages(void* memory, int64_t bytes);

}  // namespace quire
