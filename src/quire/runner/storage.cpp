#include "quire/runner/storage.h"

#include <cstring>
#include <new>

#include "quire/base/lazy.h"
#include "quire/device/device.h"

namespace quire {
namespace {

class HostStorage final : public Storage {
 public:
  const Context& context() const override { return host(); }
  std::shared_ptr<void> allocate(int64_t bytes) const override {
    constexpr std::align_val_t kAlignment{64};
    return {::operator new(static_cast<size_t>(bytes), kAlignment), [](void* p) { ::operator delete(p, kAlignment); }};
  }
  void copy(void* to, const void* from, int64_t bytes) const override {
    if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
  }
  void upload(void* to, const void* from, int64_t bytes) const override { copy(to, from, bytes); }
};

}  // namespace

const Storage& host_storage() {
  static constinit Lazy<HostStorage> one;
  return one.get();
}

}  // namespace quire
