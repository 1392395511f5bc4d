// A cuBLASLt of the host, which computes a product in double from what it has been told, as NVIDIA documents it, and
// from nothing else: so it shows whether a product was described rightly.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "quire/cuda/driver.h"

namespace quire::testing {

/// One product that ran: attributes of the description and of the wishes under which its algorithm was found.
struct LtCall {
  std::map<int, std::string> product, wishes;
};

/// Memory that a product uses.
struct LtUse {
  std::string_view what;
  const void* data;
  size_t bytes;
  bool written = false;
};

/// The device where products run.
class LtPlace {
 public:
  virtual ~LtPlace() = default;
  /// Whether this is memory of it.
  virtual bool has(const void* data) = 0;
  /// Runs compute(where), now or later, in the order of the stream; where: of each use, where the host finds it.
  virtual void run(std::span<const LtUse> uses, void* stream,
                   std::function<void(const std::vector<const void*>& where)> compute) = 0;
};

/// What it saw and does, of all products.
struct LtState {
  cuda::Machine machine;
  LtPlace* place = nullptr;
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
