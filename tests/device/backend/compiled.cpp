// Kernels that Inductor wrote and compiled (inductor.py), as launches.
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"

namespace testdevice {
namespace {

/// The entry of a kernel's library: addresses of its tensors and its sizes, each in the order of its parameters.
using Entry = void (*)(void* const* tensors, const int64_t* numbers);

/// Runs on the current stream of the device of the kernel's tensors. `written`: which of them it writes. A tensor of
/// the host is one number, which is copied when it is launched.
void launch_compiled(std::string name, int64_t entry, const at::TensorList tensors, at::IntArrayRef written,
                     at::IntArrayRef numbers) {
  const auto first = std::find_if(tensors.begin(), tensors.end(), is_ours);
  TORCH_CHECK(first != tensors.end(), name, ": a kernel of the test device got no tensor of it");
  Launch launch(std::move(name), stream_of(*first));
  std::vector<at::Tensor> there;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const bool writes = std::find(written.begin(), written.end(), static_cast<int64_t>(i)) != written.end();
    there.push_back(is_ours(tensors[i]) ? shadow(launch, tensors[i], writes ? Use::writes : Use::reads)
                                        : tensors[i].clone());
  }
  std::move(launch).run([run = reinterpret_cast<Entry>(entry), there, sizes = numbers.vec()] {
    std::vector<void*> addresses;
    for (const at::Tensor& t : there) addresses.push_back(t.data_ptr());
    run(addresses.data(), sizes.data());
  });
}

TORCH_LIBRARY_FRAGMENT(testdevice, m) {
  m.def("launch_compiled(str name, int entry, Tensor[] tensors, int[] written, int[] numbers) -> ()", launch_compiled);
}

}  // namespace
}  // namespace testdevice
