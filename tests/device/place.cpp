// The device as a place where tests of the core compute (tests/quire/here.h). They read and write its memory as if it
// were the host's, at an address of its own, which is closed while kernels run. A call waits for what it launched, and
// throws what was found.
#include "quire/here.h"

#include <memory>
#include <string>

#include "parts.h"
#include "quire/base/check.h"
#include "quire/device/device.h"
#include "quire/device/dispatch.h"
#include "runtime/runtime.h"

namespace testdevice {
namespace {

/// No default stream: a kernel that ran there would be a race.
const Place kPlace{.device = 1, .stream = 1};

/// What tests hold is put back into what a call of the device is given.
struct ToDevice {
  template <class T>
  T* operator()(T* p) const {
    return static_cast<T*>(device_address(p));
  }
};

const quire::Context& on_device() {
  static const quire::Device& device = *quire::find_device("quiretest");
  static const quire::Context context{.device = &device,
                                      .index = kPlace.device,
                                      .stream = reinterpret_cast<void*>(kPlace.stream),
                                      .faults = device.faults(kPlace.device)};
  return context;
}

template <class Problem>
void run(const Problem& given, const quire::Context&) {
  Problem problem = given;
  Lists lists;
  ToDevice to;
  parts(Translator(to, lists), problem);
  open_test_addresses(false);  // finds a pointer that parts() does not name
  const std::shared_ptr<void> open(nullptr, [](void*) { open_test_addresses(true); });
  quire::run_checked(problem, on_device());
  synchronize(kPlace);
  const std::string found = violations();
  quire::check(found.empty(), "test device: ", found);
}

template <class... Problems>
struct Rows {
  template <class Problem>
  static constexpr quire::KernelRow<Problem> kRow{"quiretest", nullptr, run<Problem>};
  static quire::KernelTables make() { return {quire::KernelRows<Problems>(&kRow<Problems>, 1)...}; }
};

void* lend(size_t bytes) {
  void* const p = allocate(bytes, kPlace);
  synchronize(kPlace);  // the host writes it before a kernel does
  return test_address(p);
}

void take_back(void* p) {
  release(device_address(p));
  synchronize(kPlace);
}

}  // namespace
}  // namespace testdevice

extern "C" const quire::testing::Place* quire_test_place() {
  static const quire::Device device{"quiretest", quire::ForAllProblems<testdevice::Rows>::make()};
  static const quire::Context context{.device = &device};
  static const quire::testing::Place place{context, testdevice::lend, testdevice::take_back};
  return &place;
}
