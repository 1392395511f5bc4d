// Reports of values that break a rule (base/fault.h).
#pragma once

#include "quire/cuda/kernels/fault_site.h"

namespace quire::cuda {

/// Writes the record, unless another fault is in it. Any thread may call it.
__device__ inline void report(const FaultSite& site, ValueRule rule, const Fault& fault) {
  if (!site.record) return;
  const uint32_t heard = *const_cast<volatile uint32_t*>(&site.record->heard);
  if (atomicCAS(site.record->claim, heard, heard + 1) != heard) return;
  site.record->fault = fault;
  for (std::size_t i = 0; i < FaultRecord::kOperation; ++i) {
    site.record->operation[i] = site.operation[i];
    if (site.operation[i] == 0) break;
  }
  __threadfence_system();
  *const_cast<volatile uint32_t*>(&site.record->rule) = static_cast<uint32_t>(rule);
}

}  // namespace quire::cuda
