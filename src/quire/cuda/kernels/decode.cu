// Products of any codes: scales of a byte are multiplied into the codes, and cuts have the 128 elements that
// numerics.md 7.4 allows. Scales in float32 multiply the sums of their blocks, which are as long.
#include "quire/cuda/kernels/tensor_product.cuh"

using namespace quire;
using namespace quire::cuda;

static_assert(std::ranges::all_of(kFamilies, [](const FamilyRow& f) {
  return f.scale != ScaleKind::f32 || f.block == 0 || f.block == kLongestCut;
}));

extern "C" {

__global__ void __launch_bounds__(2 * kTensorTile, 3) decode_64(const __grid_constant__ GemmJob job) {
  multiply_tiles<kTensorTile, kLongestCut>(job, [](const OneProduct&) { return true; });
}
__global__ void __launch_bounds__(2 * kLargeTensorTile, 1) decode_128(const __grid_constant__ GemmJob job) {
  multiply_tiles<kLargeTensorTile, kLongestCut>(job, [](const OneProduct&) { return true; });
}

}  // extern "C"
