// What was found: accesses of the host, by fault, and what other files report. And counts.
#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "state.h"

namespace testdevice {
namespace {

struct Found {
  const char* kind;
  std::array<char, 240> detail;
  std::array<void*, 48> frames;
  int depth;
};

/// A fault comes from an instruction, never from within the runtime: its handler may take locks. It may not ask for
/// memory, which the faulting code may be busy with.
struct Findings {
  std::mutex mutex;
  std::array<Found, 256> found;
  size_t count = 0;
  std::array<void*, 256> opened;
  size_t opened_count = 0;
};
Findings findings;
std::atomic<int64_t> unfinished{0};
std::atomic<bool> is_capturing{false}, touched{false};
thread_local bool is_worker = false;
struct sigaction previous;

/// In a capture nothing runs on the streams that it records, and a kernel that waits for this thread never ends: there
/// is a limit.
void wait_for_kernels() {
  for (int i = 0; i < 20'000 && unfinished > 0; ++i) usleep(100);
}

void open_page(void* address) {
  const std::lock_guard lock(findings.mutex);
  void* const page = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(address) & ~(kPage - 1));
  if (findings.opened_count == findings.opened.size()) abort();
  findings.opened[findings.opened_count++] = page;
  mprotect(page, kPage, PROT_READ | PROT_WRITE);
}

/// Every mistake is written down, then the program goes on, so that one run finds all. The host sees what kernels have
/// computed by then.
void on_fault(int signal, siginfo_t* info, void* context) {
  void* const p = info->si_addr;
  std::array<char, 64> detail;
  std::snprintf(detail.data(), detail.size(), "at %p", p);
  if (in_lists(p)) {
    report("list kept", detail.data());
  } else if (in_worker_arena(p)) {
    report("beyond memory", detail.data());
  } else if (in_test_arena(p)) {
    report("test's address in a kernel", detail.data());
  } else if (device_of(p) < 0) {
    if ((previous.sa_flags & SA_SIGINFO) != 0 && previous.sa_sigaction)
      return previous.sa_sigaction(signal, info, context);
    sigaction(signal, &previous, nullptr);  // it faults again, without this handler
    return;
  } else if (is_worker) {
    report("device address in a kernel", detail.data());
  } else {
    report("host access", detail.data());
    if (is_capturing) touched = true;
    wait_for_kernels();
  }
  open_page(p);
}

std::string describe(void* frame) {
  Dl_info info{};
  if (dladdr(frame, &info) == 0 || !info.dli_fname) return "?";
  int status = -1;
  char* name = info.dli_sname ? abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status) : nullptr;
  const std::string file = info.dli_fname;
  std::array<char, 32> offset;
  std::snprintf(offset.data(), offset.size(), "%#zx",
                static_cast<size_t>(static_cast<char*>(frame) - static_cast<char*>(info.dli_fbase)));
  const std::string symbol = name ? name : info.dli_sname ? info.dli_sname : "?";
  std::free(name);
  return symbol + " (" + file.substr(file.rfind('/') + 1) + "+" + offset.data() + ")";
}

}  // namespace

void report(const char* kind, const char* detail) {
  static const bool strict = std::getenv("QUIRE_TEST_DEVICE_STRICT") != nullptr;
  const std::lock_guard lock(findings.mutex);
  if (findings.count == findings.found.size()) return;
  Found& found = findings.found[findings.count++];
  found.kind = kind;
  std::snprintf(found.detail.data(), found.detail.size(), "%s", detail);
  found.depth = backtrace(found.frames.data(), static_cast<int>(found.frames.size()));
  if (!strict) return;
  std::fprintf(stderr, "test device: %s: %s\n", kind, detail);
  backtrace_symbols_fd(found.frames.data(), found.depth, STDERR_FILENO);
  abort();
}

void close_pages() {
  const std::lock_guard lock(findings.mutex);
  for (; findings.opened_count > 0; --findings.opened_count)
    mprotect(findings.opened[findings.opened_count - 1], kPage, PROT_NONE);
}

void install_fault_handler() {
  std::array<void*, 2> frames;
  backtrace(frames.data(), 2);  // loads what it needs, outside of a signal
  device_of(nullptr);           // makes the arenas
  in_lists(nullptr);
  struct sigaction action{};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &action, &previous);
}

void set_capturing(bool capturing) {
  if (capturing) touched = false;
  is_capturing = capturing;
}
bool touched_in_capture() { return touched; }
void change_unfinished(int64_t by) { unfinished += by; }
void mark_worker() { is_worker = true; }

std::string violations() {
  const Locked r;
  const std::lock_guard lock(findings.mutex);
  std::string out;
  for (size_t i = 0; i < findings.count; ++i) {
    const Found& found = findings.found[i];
    out += std::string(found.kind) + ": " + found.detail.data() + "\n";
    for (int f = 0; f < found.depth; ++f) out += "  " + describe(found.frames[static_cast<size_t>(f)]) + "\n";
  }
  findings.count = 0;
  return out;
}

void count(const std::string& what) {
  const Locked r;
  ++r->counts[what];
}
std::string counts() {
  const Locked r;
  std::string out;
  for (const auto& [what, n] : std::exchange(r->counts, {})) out += what + "\t" + std::to_string(n) + "\n";
  return out;
}
std::string launches(bool keep) {
  const Locked r;
  std::string out;
  for (const std::string& name : std::exchange(r->names, {})) out += name + "\n";
  r->keep_names = keep;
  return out;
}

}  // namespace testdevice
