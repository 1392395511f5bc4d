// Products on machines that are described, with the stand-in of cuBLASLt.
#pragma once

#include "cuda/cublaslt_stand_in.h"
#include "cuda/product_case.h"

namespace quire::testing {

using cuda::Machine;

inline constexpr int kCublasLt = 130100;

inline Machine chip(int number, int cublaslt = kCublasLt) {
  return {.major = number / 10, .minor = number % 10, .multiprocessors = 2, .cublaslt = cublaslt};
}

/// Products on a machine with the stand-in.
class LtCases : public ProductCases {
 public:
  explicit LtCases(uint64_t seed, const Machine& machine = chip(90)) : ProductCases(seed) {
    state.memory = &twins().device.memory();
    pretend(machine);
  }

  void pretend(const Machine& machine) {
    state.machine = machine;
    if (!on_gpu()) twins().device.pretend(machine, machine.cublaslt ? &lt_stand_in(state) : nullptr);
  }

  /// Why the row refuses; empty if it does not.
  std::string refusal(const GemmProblem& p) {
    for (const KernelRow<GemmProblem>& row : kernels<GemmProblem>(twins().device)) {
      Refusal why;
      if (row.name == "cublaslt") return row.takes(p, twins().device, &why) ? "" : why.why;
    }
    return "there is no such row";
  }

  LtState state;
};

}  // namespace quire::testing
