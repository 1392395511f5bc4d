#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

#include "quire/device/library.h"
#include "quire_torch/bridge/context.h"
#include "quire_torch/bridge/matmul.h"
#include "quire_torch/bridge/tensor.h"

namespace quire_torch {
namespace {

void matmul(const quire::MatmulProblem& p, const quire::Context& context) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const at::Device device = device_of(context);
  const auto tensor = [device](const quire::Matrix& m, bool transpose = false) {
    const at::Tensor t = tensor_over(m, device);
    return transpose ? t.t() : t;
  };
  const at::ScalarType dtype = scalar_type(p.out.dtype);
  at::Tensor out = tensor(p.out);
  const at::Tensor a = tensor(p.a, p.transpose_a).to(dtype), b = tensor(p.b, p.transpose_b).to(dtype);
  if (p.bias.data) {
    const quire::Matrix row{p.bias.data, p.bias.dtype, 1, p.out.cols, p.out.cols};
    at::addmm_out(out, tensor(row).to(dtype), a, b);
  } else {
    at::mm_out(out, a, b);
  }
}

}  // namespace

void install_matmul() { quire::set_matmul(matmul); }

}  // namespace quire_torch
