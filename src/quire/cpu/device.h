// The CPU as a device: its row of kernel tables.
#pragma once

#include "quire/device/device.h"

namespace quire::cpu {

/// Kernels of the instruction set in use first, the reference last.
const Device& device();

}  // namespace quire::cpu
