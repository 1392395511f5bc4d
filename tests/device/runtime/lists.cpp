// Arrays of the host that are lent to a launch, and gone when it returns.
#include <sys/mman.h>

#include <cstring>

#include "state.h"

namespace testdevice {
namespace {

constexpr size_t kLists = size_t{1} << 30;  // then the first pages are lent again

char* arena() {
  static char* const all = [] {
    void* p = mmap(nullptr, kLists, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) fail("no address space");
    return static_cast<char*>(p);
  }();
  return all;
}

thread_local HostLists* lending = nullptr;

}  // namespace

bool in_lists(const void* p) { return p >= arena() && p < arena() + kLists; }
std::shared_ptr<Flag> lists_gone() { return lending ? lending->gone() : nullptr; }

int64_t lists() {
  const Locked r;
  return std::exchange(r->lists, 0);
}

HostLists::HostLists() : before_(std::exchange(lending, this)), gone_(std::make_shared<Flag>()) {}

HostLists::~HostLists() {
  lending = before_;
  for (const auto& [begin, bytes] : lent_) mprotect(begin, bytes, PROT_NONE);
  const Locked r;
  gone_->done = true;
  r->finished.notify_all();
}

const void* HostLists::lend(const void* list, size_t bytes) {
  if (bytes == 0) return nullptr;
  const size_t room = (bytes + kPage - 1) / kPage * kPage;
  char* begin = nullptr;
  {
    const Locked r;
    ++r->lists;
    if (r->lists_used + room > kLists) r->lists_used = 0;
    begin = arena() + std::exchange(r->lists_used, r->lists_used + room);
  }
  mprotect(begin, room, PROT_READ | PROT_WRITE);
  lent_.emplace_back(begin, room);
  std::memcpy(begin, list, bytes);
  return begin;
}

}  // namespace testdevice
