// What a kernel needs to report a value that breaks a rule: a part of its parameters.
#pragma once

#include <array>

#include "quire/base/fault.h"

namespace quire::cuda {

struct FaultSite {
  FaultRecord* record = nullptr;  ///< null: nobody hears
  std::array<char, FaultRecord::kOperation> operation = {};
};

}  // namespace quire::cuda
