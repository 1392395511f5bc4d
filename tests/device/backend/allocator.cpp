// Memory, random streams, and the hooks by which PyTorch asks for both.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>

#include <cstring>

#include "backend/backend.h"

namespace testdevice {
namespace {

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override {
    const Place at = current_stream();
    void* p = testdevice::allocate(n, at);
    return {p, p, &release, c10::Device(kType, static_cast<c10::DeviceIndex>(at.device))};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override {
    Launch launch("copy_data", current_stream());
    const auto kernel = [to = launch(to), from = launch(from), n] { std::memcpy(to, from, n); };
    std::move(launch).run(kernel);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& p, c10::Stream s) override {
    record_stream(p.get(), {s.device_index(), s.id()});
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
};
Allocator the_allocator;
REGISTER_ALLOCATOR(kType, &the_allocator)

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(c10::DeviceIndex index) {
    device_ = c10::Device(kType, index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  using Index = c10::DeviceIndex;
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(Index) const override { return true; }
  Index deviceCount() const override { return kDevices; }
  void setCurrentDevice(Index d) const override { exchange_device(d); }
  Index getCurrentDevice() const override { return static_cast<Index>(current_device()); }
  Index exchangeDevice(Index d) const override { return static_cast<Index>(exchange_device(d)); }
  Index maybeExchangeDevice(Index d) const override { return exchangeDevice(d); }
  at::Device getDeviceFromPtr(void* p) const override {
    TORCH_CHECK(device_of(p) >= 0, "not memory of the test device");
    return {kType, static_cast<Index>(device_of(p))};
  }
  const at::Generator& getDefaultGenerator(Index d) const override {
    static const std::array<at::Generator, kDevices> all{at::make_generator<Generator>(0),
                                                         at::make_generator<Generator>(1)};
    return all.at(static_cast<size_t>(d < 0 ? current_device() : d));
  }
  at::Generator getNewGenerator(Index d) const override {
    return at::make_generator<Generator>(d < 0 ? getCurrentDevice() : d);
  }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t n) const override { resize_storage(s, n); }
};
const bool registered = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

}  // namespace

c10::Allocator& allocator() { return the_allocator; }

void resize_storage(const c10::Storage& storage, size_t bytes) {
  const c10::DeviceGuard guard(storage.device());
  c10::DataPtr data = the_allocator.allocate(bytes);
  if (const size_t kept = std::min(bytes, storage.nbytes())) the_allocator.copy_data(data.get(), storage.data(), kept);
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

uint64_t next_seed(std::optional<at::Generator> generator, c10::Device device) {
  if (!generator) generator = at::globalContext().defaultGenerator(device);
  return generator->get<Generator>()->random64();
}

}  // namespace testdevice
