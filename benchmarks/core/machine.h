// What the machine can do at best, measured beside the kernels: threads, copying, reading, arithmetic.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "quire/base/parallel.h"

namespace quire::bench {

/// memcpy, cut over the executor's threads.
void copy(void* to, const void* from, int64_t bytes);

/// Reads every byte once, over the executor's threads.
void read(const void* from, int64_t bytes);

/// A loop that keeps one kind of arithmetic unit busy and touches no memory.
struct Peak {
  std::string_view name;
  double operations;  ///< of one call of run() on one thread; a multiplication and an addition are two
  void (*run)();
};

/// Those that this machine has the instructions for.
std::vector<Peak> peaks();

}  // namespace quire::bench
