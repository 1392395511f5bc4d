// quire's CUDA kernels for the test device.
#pragma once

#include "quire/device/device.h"

namespace testdevice {

/// The rows of a GPU. What they launch runs on this device from now on.
const quire::KernelTables& cuda_rows();
/// Where their kernels report faults.
quire::FaultRecord* cuda_faults(int index);

}  // namespace testdevice
