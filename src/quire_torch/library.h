// What libquire_torch offers to libraries that bring another device.
#pragma once

#include <torch/library.h>

namespace quire_torch {

/// Implements quire's operators under the dispatch key of a device that quire::register_device knows by PyTorch's name
/// for it. To be called in a TORCH_LIBRARY_IMPL block: `TORCH_LIBRARY_IMPL(quire, PrivateUse1, m) {
/// quire_torch::implement_kernels(m, c10::DispatchKey::PrivateUse1); }`.
void implement_kernels(torch::Library& m, c10::DispatchKey key);

}  // namespace quire_torch
