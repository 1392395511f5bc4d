#include "quire/cuda/device.h"

#include "quire/cuda/driver.h"
#include "quire/cuda/rows.h"

namespace quire::cuda {
namespace {

FaultRecord* faults(int index) { return driver().faults(index); }
bool capturing(int index, void* stream) { return driver().capturing(index, stream); }

/// Whoever loads this library has one more kind of device.
const bool registered = [] {
  register_device(device());
  return true;
}();

}  // namespace

const Device& device() {
  static constexpr Device kDevice{
      "cuda",
      {kQuantize,  kAmax,          kDequantize, kReorder,    kGemm,           kMatmul,
       kColumnSum, kNorm,          kNormGrad,   kActivation, kActivationGrad, kRoute,
       kRouteGrad, kLimitCapacity, kPermute,    kUnpermute,  kPermutedDot,    kExpertRows,
       kChunkRows, kFingerprint,   kAdvance,    kMaximum,    kCollect,        kDelayedUpdate},
      faults,
      capturing};
  return kDevice;
}

}  // namespace quire::cuda
