// The generic algorithms compiled against one vocabulary.
#include "quire/cpu/generic/includes.h"

namespace quire::cpu::scalar {
namespace {
#include "quire/cpu/simd/scalar.h"

// The algorithms speak the vocabulary above.
#include "quire/cpu/generic/all.inl.h"
}  // namespace

const Kernels kKernels{quantize,   dequantize,      multiply_matrix_f32, column_sum, norm,  norm_grad,
                       activation, activation_grad, fingerprint,         amax,       matmul};

}  // namespace quire::cpu::scalar
