#include "quire/cuda/driver.h"

namespace quire::cuda {
namespace {

std::atomic<Driver*> replaced{nullptr};

}  // namespace

Driver& driver() {
  if (Driver* const other = replaced.load(std::memory_order_acquire)) return *other;
  return nvidia_driver();
}

Driver* set_driver(Driver* driver) { return replaced.exchange(driver); }

}  // namespace quire::cuda
