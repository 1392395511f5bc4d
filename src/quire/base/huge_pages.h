// Pages of 2 MiB for results.
#pragma once

#include <sys/mman.h>

#include <cstdint>

namespace quire {

/// From how many bytes on results ask for such pages: two of them, so that one is whole wherever the memory begins.
inline constexpr int64_t kHugePageBytes = int64_t{4} << 20;

/// Asks the system to back `bytes` of fresh memory with pages of 2 MiB where it has them (madvise). The first touch of
/// each page of 4 KiB costs more than writing it: the gradient of a 4096 x 4096 weight in bfloat16 has 8192 of them.
/// bytes: at least kHugePageBytes.
inline void ask_for_huge_pages(void* memory, int64_t bytes) {
  constexpr uintptr_t kPage = uintptr_t{2} << 20;
  const auto first = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t begin = (first + kPage - 1) / kPage * kPage;
  const uintptr_t end = (first + static_cast<uintptr_t>(bytes)) / kPage * kPage;
  // A refusal changes nothing: the memory has small pages then.
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

}  // namespace quire
