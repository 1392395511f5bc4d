// Products of 4-bit codes with the bits of numerics.md 7.4: sums within a block are exact in any order, so tensor cores
// may make them. Cuts are scaled and added in the order of the contraction.
#include "quire/cuda/kernels/tensor_product.cuh"

using namespace quire;
using namespace quire::cuda;

namespace {

/// E4M3 scales leave these sums exact: 12 bits of a sum of codes by 4 bits of each scale. E8M0 scales may lead out of
/// the numbers of float32 on the way, so they multiply one after the other.
struct StaysExact {
  __device__ bool operator()(const OneProduct& p) const {
    return p.a.from.spec.row().scale == ScaleKind::two_level && p.b.from.spec.row().scale == ScaleKind::two_level;
  }
};

}  // namespace

extern "C" {

__global__ void __launch_bounds__(2 * kTensorTile, 2) exact_16(const __grid_constant__ GemmJob job) {
  multiply_tiles<kTensorTile, 16>(job, StaysExact());
}
__global__ void __launch_bounds__(2 * kTensorTile, 2) exact_32(const __grid_constant__ GemmJob job) {
  multiply_tiles<kTensorTile, 32>(job, StaysExact());
}

}  // extern "C"
