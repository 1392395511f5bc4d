#include "quire/cuda/device.h"

#include "quire/cuda/driver.h"
#include "quire/cuda/self_check.h"

namespace quire::cuda {
namespace {

FaultRecord* faults(int index) { return driver().faults(index); }
bool capturing(int index, void* stream) { return driver().capturing(index, stream); }

/// Tables whose rows refuse what they have got wrong.
template <const auto&... kTables>
struct CheckedTables {
  std::tuple<std::remove_cvref_t<decltype(kTables)>...> rows{checked_rows<kTables>()...};

  KernelTables views() const {
    return std::apply([](const auto&... each) { return KernelTables{each...}; }, rows);
  }
};
const CheckedTables<kQuantize, kAmax, kDequantize, kReorder, kGemm, kMatmul, kColumnSum, kNorm, kNormGrad, kActivation,
                    kActivationGrad, kRoute, kRouteGrad, kLimitCapacity, kPermute, kUnpermute, kPermutedDot,
                    kExpertRows, kChunkRows, kFingerprint, kAdvance, kMaximum, kCollect, kDelayedUpdate>
    tables;
const Device cuda_device{"cuda", tables.views(), faults, capturing};

/// Whoever loads this library has one more kind of device.
const bool registered = [] {
  register_device(device());
  return true;
}();

}  // namespace

const Device& device() { return cuda_device; }

}  // namespace quire::cuda
