// The device code that this library holds: one module for each file kernels/*.cu, as a fat binary.
#pragma once

#include <string_view>

namespace quire::cuda {

/// The fat binary of a module, as the driver takes it.
const void* module_code(std::string_view module);

}  // namespace quire::cuda
