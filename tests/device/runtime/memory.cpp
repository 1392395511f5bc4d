// Memory with two addresses, lent in the order of streams.
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "state.h"

namespace testdevice {
namespace {

struct Arena {
  char* device;  ///< PROT_NONE for ever
  char* worker;  ///< the same pages
  char* test;    ///< the same
  size_t used = 0;
};

Arena make_arena() {
  const int file = memfd_create("testdevice", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, kArena) != 0) fail("no file in memory");
  const auto map = [&](int protection) {
    void* p = mmap(nullptr, kArena, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (p == MAP_FAILED) fail("no address space");
    return static_cast<char*>(p);
  };
  const Arena arena{map(PROT_NONE), map(PROT_READ | PROT_WRITE), map(PROT_READ | PROT_WRITE)};
  close(file);
  return arena;
}

std::array<Arena, kDevices>& arenas() {
  static std::array<Arena, kDevices> all{make_arena(), make_arena()};
  return all;
}

bool within(const void* p, const char* begin) { return p >= begin && p < begin + kArena; }

/// Written down as an access, so that a kernel that comes too late is found too.
Node poison(const std::shared_ptr<Block>& b) {
  return {"poison", [p = worker_address(b->begin), n = b->bytes()] { std::memset(p, 0xff, n); }, {{b, b->loan, true}}};
}

std::shared_ptr<Block> new_block(Place at, size_t pages) {
  Arena& arena = arenas()[static_cast<size_t>(at.device)];
  const size_t size = (pages + 1) * kPage;  // one page more, which stays closed
  if (arena.used + size > kArena) fail("out of memory");
  auto b = std::make_shared<Block>(Block{.begin = arena.device + arena.used, .pages = pages, .home = at});
  arena.used += size;
  mprotect(arena.worker + arena.used - kPage, kPage, PROT_NONE);
  return b;
}

/// What p points into, its end included.
std::shared_ptr<Block> block_of(Runtime& r, const void* p) {
  auto next = r.blocks.upper_bound(static_cast<const char*>(p));
  if (next == r.blocks.begin()) return nullptr;
  const std::shared_ptr<Block>& b = std::prev(next)->second;
  return p <= b->begin + b->bytes() ? b : nullptr;
}

}  // namespace

int device_of(const void* p) {
  for (int d = 0; d < kDevices; ++d)
    if (within(p, arenas()[static_cast<size_t>(d)].device)) return d;
  return -1;
}
bool in_worker_arena(const void* p) {
  for (const Arena& arena : arenas())
    if (within(p, arena.worker)) return true;
  return false;
}
char* worker_address(const void* p) {
  const Arena& arena = arenas()[static_cast<size_t>(device_of(p))];
  return arena.worker + (static_cast<const char*>(p) - arena.device);
}

bool in_test_arena(const void* p) {
  for (const Arena& arena : arenas())
    if (within(p, arena.test)) return true;
  return false;
}
void* test_address(const void* p) {
  const Arena& arena = arenas()[static_cast<size_t>(device_of(p))];
  return arena.test + (static_cast<const char*>(p) - arena.device);
}
void* device_address(const void* p) {
  for (const Arena& arena : arenas())
    if (within(p, arena.test)) return arena.device + (static_cast<const char*>(p) - arena.test);
  return const_cast<void*>(p);
}
void open_test_addresses(bool open) {
  for (const Arena& arena : arenas()) mprotect(arena.test, arena.used, open ? PROT_READ | PROT_WRITE : PROT_NONE);
}

bool is_lent(const void* p) {
  if (device_of(p) < 0) return false;
  const Locked r;
  const std::shared_ptr<Block> b = block_of(*r, p);
  return b && b->live && p < b->begin + b->bytes();
}

const void* Launch::translate(const void* p, bool writes, int expected_device) {
  if (!p) return p;
  const int device = device_of(p);
  if (device < 0) {
    Dl_info library;
    if (dladdr(p, &library) != 0) return p;  // a mark, or a table of constants
    const std::string detail = "'" + name_ + "' is given memory of the host";
    report("host memory", detail.c_str());
    uses_host_memory_ = true;
    return p;
  }
  if (device != expected_device)
    fail("'" + name_ + "' on stream " + text(at_) + " is given memory of device " + std::to_string(device));
  const Locked r;
  const std::shared_ptr<Block> b = block_of(*r, p);
  if (!b || !b->live) fail("'" + name_ + "' on stream " + text(at_) + " is given memory that was freed");
  accesses_.push_back({b, b->loan, writes});
  return worker_address(p);
}

void* allocate(size_t bytes, Place at) {
  if (bytes == 0) return nullptr;
  const Locked r;
  Graph* const graph = graph_of(*r, at);
  if (!graph) refuse(*r, "allocating on stream " + text(at) + ", which is not captured,");
  const size_t pages = (bytes + kPage - 1) / kPage;
  const int64_t owner = graph ? r->capture : 0;
  auto& shelf = r->free[{at, owner, pages}];
  std::shared_ptr<Block> b;
  if (shelf.empty()) {
    b = new_block(at, pages);
    b->graph = owner;
    r->blocks[b->begin] = b;
    submit(*r, at, poison(b));
  } else {
    b = shelf.back();
    shelf.pop_back();
  }
  b->live = true;
  b->offset = (b->bytes() - bytes) / 64 * 64;
  ++b->loan;
  return b->lent();
}

void release(void* p) {
  if (!p) return;
  const Locked r;
  const std::shared_ptr<Block> b = block_of(*r, p);
  if (!b || !b->live || b->lent() != p) fail("released what is not lent");
  b->live = false;
  ++b->loan;
  for (const Place user : std::exchange(b->users, {})) {
    std::shared_ptr<Flag> flag;
    record(*r, flag, user);
    block(*r, flag, b->home);
  }
  // Memory of a graph belongs to its replays: only what the graph itself frees is filled, by the graph.
  if (b->graph == 0 || graph_of(*r, b->home)) submit(*r, b->home, poison(b));
  if (!r->graphs.contains(b->graph)) b->graph = 0;
  r->free[{b->home, b->graph, b->pages}].push_back(b);
}

void record_stream(void* p, Place at) {
  const Locked r;
  const std::shared_ptr<Block> b = p ? block_of(*r, p) : nullptr;
  if (b && b->live && b->home != at) b->users.insert(at);
}

}  // namespace testdevice
