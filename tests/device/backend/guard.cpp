// Devices, streams and events.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "backend/backend.h"

namespace testdevice {
namespace {

using Index = c10::DeviceIndex;

Place place(const c10::Stream& s) { return {s.device_index(), s.id()}; }
c10::Stream stream(Place at) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, static_cast<Index>(at.device)), at.stream);
}
int index(c10::Device d) { return d.has_index() ? d.index() : current_device(); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device d) const override {
    return {kType, static_cast<Index>(exchange_device(d.index()))};
  }
  c10::Device getDevice() const override { return {kType, static_cast<Index>(current_device())}; }
  void setDevice(c10::Device d) const override { exchange_device(d.index()); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { exchange_device(d.index()); }
  Index deviceCount() const noexcept override { return kDevices; }
  void synchronizeDevice(const Index d) const override { synchronize_device(d); }

  c10::Stream getStream(c10::Device d) const override { return stream(current_stream(index(d))); }
  c10::Stream getDefaultStream(c10::Device d) const override { return stream({index(d), 0}); }
  c10::Stream getNewStream(c10::Device d, int) const override { return stream(next_stream(index(d))); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream exchangeStream(c10::Stream s) const override { return stream(exchange_stream(place(s))); }
  /// Its number: null is the default stream, as CUDA has it.
  void* getStreamNativeHandle(const c10::Stream s) const override {
    return reinterpret_cast<void*>(static_cast<uintptr_t>(s.id()));
  }
  bool queryStream(const c10::Stream& s) const override { return idle(place(s)); }
  void synchronizeStream(const c10::Stream& s) const override { synchronize(place(s)); }
  void recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& s) const override {
    record_stream(p.get(), place(s));
  }

  void record(void** event, const c10::Stream& s, const Index, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    static_cast<Event*>(*event)->record(place(s));
  }
  void block(void* event, const c10::Stream& s) const override {
    if (event) static_cast<Event*>(event)->block(place(s));
  }
  bool queryEvent(void* event) const override { return !event || static_cast<Event*>(event)->done(); }
  void synchronizeEvent(void* event) const override {
    if (event) static_cast<Event*>(event)->synchronize();
  }
  void destroyEvent(void* event, const Index) const noexcept override { delete static_cast<Event*>(event); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace
}  // namespace testdevice
