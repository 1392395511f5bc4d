// What tests ask of the device, and mistakes for them to make.
#include <ATen/Context.h>
#include <ATen/ops/ones.h>
#include <torch/library.h>

#include <mutex>
#include <span>
#include <vector>

#include "backend/backend.h"

namespace testdevice {
namespace {

Place place(int64_t device, int64_t stream) { return {static_cast<int>(device), stream}; }

at::Generator default_generator(int64_t device) {
  return at::globalContext().defaultGenerator(c10::Device(kType, static_cast<c10::DeviceIndex>(device)));
}

void add_one(float* p, int64_t count) {
  for (int64_t i = 0; i < count; ++i) p[i] += 1;
}

/// PyTorch's thread of a device lets go of a backward pass a moment after its caller goes on. Tensors that have Python
/// objects ask for Python's lock then, and once Python has begun to end this aborts the process. A thread that has
/// begun another pass has let go of the last one; this pass has no Python objects.
void finish_backward_passes() {
  for (int device = 0; device < kDevices; ++device) {
    const at::Tensor leaf = at::ones(1, at::device({kType, static_cast<c10::DeviceIndex>(device)}));
    leaf.requires_grad_();
    leaf.mul(2).backward();
  }
}

TORCH_LIBRARY(testdevice, m) {
  m.def("device_name() -> str", [] { return std::string(kName); });
  m.def("counts() -> str", [] { return counts(); });
  m.def("violations() -> str", [] { return violations(); });
  m.def("lists() -> int", [] { return lists(); });
  m.def("launches(bool keep) -> str", [](bool keep) { return launches(keep); });
  m.def("set_delay(int microseconds) -> ()", [](int64_t us) { set_delay(static_cast<int>(us)); });
  m.def("set_delay_of(int device, int stream, int microseconds) -> ()",
        [](int64_t d, int64_t s, int64_t us) { set_delay(place(d, s), static_cast<int>(us)); });
  m.def("current_device() -> int", [] { return static_cast<int64_t>(current_device()); });
  m.def("set_device(int device) -> int",
        [](int64_t d) { return static_cast<int64_t>(exchange_device(static_cast<int>(d))); });

  m.def("finish_backward_passes() -> ()", [] { finish_backward_passes(); });

  m.def("manual_seed(int seed) -> ()", [](int64_t seed) {
    for (int device = 0; device < kDevices; ++device) {
      at::Generator generator = default_generator(device);
      const std::lock_guard lock(generator.mutex());
      generator.set_current_seed(static_cast<uint64_t>(seed));
    }
  });
  m.def("get_rng_state(int device) -> Tensor", [](int64_t device) { return default_generator(device).get_state(); });
  m.def("set_rng_state(int device, Tensor state) -> ()",
        [](int64_t device, const at::Tensor& state) { default_generator(device).set_state(state); });
  m.def("begin_capture() -> int", [] { return begin_capture(current_stream()); });
  m.def("end_capture() -> ()", [] { end_capture(); });
  m.def("replay(int graph) -> ()", [](int64_t graph) { replay(graph, current_stream()); });
  m.def("drop_graph(int graph) -> ()", [](int64_t graph) { drop_graph(graph); });

  // Operators that read on the host, and that launch with whatever they are given. Where their arguments are wrong,
  // they are the mistakes that the device is there to find.
  m.def("peek(Tensor t) -> int",
        [](const at::Tensor& t) { return static_cast<int64_t>(*static_cast<const uint8_t*>(t.const_data_ptr())); });
  m.def("add_one(int address, int count, int device, int stream) -> ()",
        [](int64_t address, int64_t count, int64_t device, int64_t stream) {
          Launch launch("add_one", place(device, stream));
          float* p = launch(reinterpret_cast<float*>(address));
          std::move(launch).run([=] { add_one(p, count); });
        });
  // Launches with a list, whose kernel reads its own copy, or the list itself.
  m.def("add_listed(int address, int[] values, bool keep) -> ()",
        [](int64_t address, at::IntArrayRef values, bool keep) {
          HostLists lists;
          const std::span<const int64_t> list = lists.lend(std::span<const int64_t>(values));
          Launch launch("add_listed", current_stream());
          float* p = launch(reinterpret_cast<float*>(address));
          const auto add = [p](const auto& numbers) {
            for (const int64_t number : numbers) *p += static_cast<float>(number);
          };
          if (keep)
            std::move(launch).run([=] { add(list); });
          else
            std::move(launch).run([add, own = std::vector<int64_t>(list.begin(), list.end())] { add(own); });
        });
  m.def("add_one_untranslated(int address, int count) -> ()", [](int64_t address, int64_t count) {
    Launch("add_one_untranslated", current_stream()).run([=] { add_one(reinterpret_cast<float*>(address), count); });
  });
}

}  // namespace
}  // namespace testdevice
