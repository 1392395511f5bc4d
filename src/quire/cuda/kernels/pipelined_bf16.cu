// Plain products in bfloat16 by a pipeline, whose operands are read along their lines, or across those of b or of both.
#include "quire/cuda/kernels/plain_pipelined.cuh"

using namespace quire;
using namespace quire::cuda;

extern "C" {

__global__ void __launch_bounds__(128, 2) plain_bf16_128_along(const __grid_constant__ MatmulJob job) {
  multiply_pipelined<DType::bf16, 128, false, false>(job);
}
__global__ void __launch_bounds__(128, 2) plain_bf16_128_across_b(const __grid_constant__ MatmulJob job) {
  multiply_pipelined<DType::bf16, 128, false, true>(job);
}
__global__ void __launch_bounds__(128, 2) plain_bf16_128_across(const __grid_constant__ MatmulJob job) {
  multiply_pipelined<DType::bf16, 128, true, true>(job);
}
__global__ void __launch_bounds__(256, 1) plain_bf16_256_along(const __grid_constant__ MatmulJob job) {
  multiply_pipelined<DType::bf16, 256, false, false>(job);
}
__global__ void __launch_bounds__(256, 1) plain_bf16_256_across_b(const __grid_constant__ MatmulJob job) {
  multiply_pipelined<DType::bf16, 256, false, true>(job);
}
__global__ void __launch_bounds__(256, 1) plain_bf16_256_across(const __grid_constant__ MatmulJob job) {
  multiply_pipelined<DType::bf16, 256, true, true>(job);
}

}  // extern "C"
