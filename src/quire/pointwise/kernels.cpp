#include "quire/pointwise/kernels.h"

#include <array>

#include "quire/cpu/isa.h"
#include "quire/pointwise/reference.h"

namespace quire {
namespace {

/// The kernel of the instruction set in use, then the reference.
template <class Problem, void (*cpu::Kernels::*Generic)(const Problem&), void (*Reference)(const Problem&)>
constexpr std::array<KernelRow<Problem>, 2> kRows{{
    {"generic", takes_all, [](const Problem& p) { (cpu::active().kernels->*Generic)(p); }},
    {"reference", takes_all, Reference},
}};

}  // namespace

template <>
std::span<const KernelRow<NormProblem>> pointwise_kernels() {
  return kRows<NormProblem, &cpu::Kernels::norm, reference::norm>;
}
template <>
std::span<const KernelRow<NormGradProblem>> pointwise_kernels() {
  return kRows<NormGradProblem, &cpu::Kernels::norm_grad, reference::norm_grad>;
}
template <>
std::span<const KernelRow<ActivationProblem>> pointwise_kernels() {
  return kRows<ActivationProblem, &cpu::Kernels::activation, reference::activation>;
}
template <>
std::span<const KernelRow<ActivationGradProblem>> pointwise_kernels() {
  return kRows<ActivationGradProblem, &cpu::Kernels::activation_grad, reference::activation_grad>;
}

}  // namespace quire
