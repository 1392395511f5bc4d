// CUDA as a kind of device.
#pragma once

#include "quire/device/device.h"

namespace quire::cuda {

const Device& device();

}  // namespace quire::cuda
