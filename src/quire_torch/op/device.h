// All that the operators ask about the kind of a PyTorch device. Which devices the core has is asked in
// quire/device/device.h.
#pragma once

#include <c10/core/Device.h>

namespace quire_torch::op {

/// The device of numbers that the host reads, whichever device computes.
inline constexpr c10::DeviceType kHost = c10::kCPU;

inline bool on_host(c10::Device device) { return device.type() == kHost; }

}  // namespace quire_torch::op
