// What a place of execution is called, in runners, errors and PyTorch.
#pragma once

#include <string>

#include "quire/base/check.h"
#include "quire/device/device.h"

namespace quire {

/// "cpu", or a device with its number, "cuda:0".
inline std::string place_of(const Context& context) {
  if (on_host(context)) return std::string(host().device->name);
  return text(context.device->name, ":", context.index);
}

}  // namespace quire
