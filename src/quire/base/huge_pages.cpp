#include "quire/base/huge_pages.h"

#include <sys/mman.h>

namespace quire {

void ask_for_huge_pages(void* memory, int64_t bytes) {
  constexpr uintptr_t kPage = uintptr_t{2} << 20;
  const auto first = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t begin = (first + kPage - 1) / kPage * kPage;
  const uintptr_t end = (first + static_cast<uintptr_t>(bytes)) / kPage * kPage;
  // A refusal changes nothing: the memory has small pages then.
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

}  // namespace quire
