// The test device as PyTorch sees it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include "runtime/runtime.h"

namespace testdevice {

constexpr auto kType = c10::DeviceType::PrivateUse1;
/// What PyTorch calls it.
constexpr const char* kName = "quiretest";

c10::Allocator& allocator();
void resize_storage(const c10::Storage& storage, size_t bytes);
/// A seed out of a random stream, by default the device's.
uint64_t next_seed(std::optional<at::Generator> generator, c10::Device device);

inline bool is_ours(const at::Tensor& t) { return t.defined() && t.device().type() == kType; }
inline Place stream_of(const at::Tensor& t) { return current_stream(t.device().index()); }
enum class Use { reads, writes, copies_from };
/// A CPU tensor over the memory of a device tensor, for the kernel of `launch`: no owner.
at::Tensor shadow(Launch& launch, const at::Tensor& t, Use use);

}  // namespace testdevice
