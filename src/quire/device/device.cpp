#include "quire/device/device.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <filesystem>

#include "quire/base/lazy.h"
#include "quire/cpu/device.h"

namespace quire {
namespace {

/// Built-in kinds, the host first.
const Device* const kDevices[] = {&cpu::device()};

/// Kinds that others have registered: a list that only grows, which readers need no lock for.
struct Registered {
  const Device& device;
  const Registered* next;
};
std::atomic<const Registered*> registered{nullptr};

const Device* known_device(std::string_view name) {
  for (const Device* device : kDevices)
    if (device->name == name) return device;
  for (const Registered* r = registered; r; r = r->next)
    if (r->device.name == name) return &r->device;
  return nullptr;
}

/// A kind whose kernels lie in a library beside this one, which registers it when it is opened.
struct Apart {
  std::string_view name;
  const char* library;
  Lazy<const std::string> absence;  ///< once it has been looked for
};
constinit Apart apart[] = {{"cuda", "libquire_cuda.so", {}}};

/// Opens the library of a kind. Returns why there is none, or "".
std::string open(const Apart& kind) {
  Dl_info here;
  if (!dladdr(reinterpret_cast<const void*>(&open), &here)) return "the folder of libquire.so is not known";
  const std::filesystem::path path = std::filesystem::path(here.dli_fname).parent_path() / kind.library;
  if (!std::filesystem::exists(path)) return text("this build has no ", kind.library, ", which needs nvcc");
  return dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL) ? "" : dlerror();
}

}  // namespace

const Device* find_device(std::string_view name) {
  if (const Device* const device = known_device(name)) return device;
  return absence_of(name).empty() ? known_device(name) : nullptr;
}

bool is_kind_of_device(std::string_view name) {
  return known_device(name) || std::ranges::any_of(apart, [&](const Apart& kind) { return kind.name == name; });
}

std::string_view absence_of(std::string_view name) {
  if (known_device(name)) return "";
  for (Apart& kind : apart)
    if (kind.name == name) return kind.absence.get([&] { return open(kind); });
  return "there is no such kind of device";
}

void register_device(const Device& device) {
  check(!find_device(device.name), "register_device: there is a device '", device.name, "' already; use another name");
  auto* const added = new Registered{device, registered};
  while (!registered.compare_exchange_weak(added->next, added)) continue;
}

bool on_host(const Context& context) { return !context.device || context.device == kDevices[0]; }

const Context& host() {
  static constinit Lazy<const Context> context;
  return context.get([] { return Context{.device = kDevices[0]}; });
}

}  // namespace quire
