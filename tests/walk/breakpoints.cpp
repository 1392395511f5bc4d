// Breakpoints that a process sets in itself, each of which is passed once: int3 at an address, and a handler that notes
// in which order addresses were reached and puts the instruction back. Needs no tracer and no right to trace, and costs
// a signal for each address that is reached, however often the code runs. x86-64 Linux only.
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace {

constexpr uint8_t kBreakpoint = 0xcc;

struct Place {
  uint8_t original = 0;             ///< the byte that the breakpoint hides
  std::atomic<uint32_t> order = 0;  ///< 1 for the first that was reached, 0 if it was not
};

std::vector<uintptr_t> addresses;  // ascending
std::vector<Place> places;
std::atomic<uint32_t> reached = 0;
struct sigaction before;

void put(uintptr_t address, uint8_t byte) {
  __atomic_store_n(reinterpret_cast<uint8_t*>(address), byte, __ATOMIC_SEQ_CST);
}

void on_trap(int signal, siginfo_t*, void* context) {
  greg_t& counter = static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP];
  const auto address = static_cast<uintptr_t>(counter) - 1;
  const auto found = std::lower_bound(addresses.begin(), addresses.end(), address);
  if (found == addresses.end() || *found != address) {  // somebody else's: it traps again, to whoever was there before
    sigaction(signal, &before, nullptr);
    return;
  }
  Place& place = places[static_cast<size_t>(found - addresses.begin())];
  // Threads that reach one address at a time all come here; the first one counts.
  uint32_t none = 0;
  if (place.order.compare_exchange_strong(none, UINT32_MAX)) place.order = ++reached;
  put(address, place.original);
  --counter;
}

}  // namespace

extern "C" {

/// 0, or -1 with errno where the system allows no writing to code.
int set_breakpoints(const uintptr_t* ascending, size_t count) {
  addresses.assign(ascending, ascending + count);
  places = std::vector<Place>(count);
  reached = 0;
  struct sigaction action{};
  action.sa_sigaction = on_trap;
  action.sa_flags = SA_SIGINFO | SA_RESTART;
  const auto size = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  uintptr_t writable = 0;
  for (const uintptr_t address : addresses) {
    const uintptr_t page = address / size * size;
    if (page != writable && mprotect(reinterpret_cast<void*>(page), size, PROT_READ | PROT_WRITE | PROT_EXEC))
      return -1;
    writable = page;
  }
  if (sigaction(SIGTRAP, &action, &before)) return -1;
  for (size_t i = 0; i < count; ++i) {
    places[i].original = *reinterpret_cast<const uint8_t*>(addresses[i]);
    put(addresses[i], kBreakpoint);
  }
  return 0;
}

/// How many have been reached by now.
uint32_t count_reached() { return reached; }

/// Takes all away, and writes for each in which order it was reached, 0 for not at all.
void remove_breakpoints(uint32_t* order) {
  for (size_t i = 0; i < addresses.size(); ++i) {
    put(addresses[i], places[i].original);
    order[i] = places[i].order;
  }
  sigaction(SIGTRAP, &before, nullptr);
}
}
