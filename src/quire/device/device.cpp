#include "quire/device/device.h"

#include <atomic>

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

}  // namespace

const Device* find_device(std::string_view name) {
  for (const Device* device : kDevices)
    if (device->name == name) return device;
  for (const Registered* r = registered; r; r = r->next)
    if (r->device.name == name) return &r->device;
  return nullptr;
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
