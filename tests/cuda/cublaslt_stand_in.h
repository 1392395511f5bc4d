// A cuBLASLt of the host, which computes a product in double from what it has been told, as NVIDIA documents it, and
// from nothing else: so it shows whether a product was described rightly.
#pragma once

#include <array>
#include <map>
#include <string>

#include "cuda/cuda_device.h"

namespace quire::testing {

/// One product that ran: attributes of the description and of the wishes under which its algorithm was found.
struct LtCall {
  std::map<int, std::string> product, wishes;
};

/// What it saw and does, of all products.
struct LtState {
  cuda::Machine machine;
  DeviceMemory* memory = nullptr;
  int creation = 0;  ///< the status of each handle that is made
  int answer = 0;    ///< of each algorithm that is found
  int result = 0;    ///< of each product
  int asked = 0;     ///< heuristics
  int handles = 0;
  size_t workspace = 4096;
  LtCall last;
};

/// Another one with each call, which leaves to no product what an earlier one was told. It uses `state`.
const cuda::lt::Functions& lt_stand_in(LtState& state);

}  // namespace quire::testing
