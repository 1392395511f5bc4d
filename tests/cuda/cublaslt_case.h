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

/// Products of the stand-in on the emulated device.
class LtOnEmulator final : public LtPlace {
 public:
  explicit LtOnEmulator(DeviceMemory& memory) : memory_(memory) {}
  bool has(const void* data) override { return memory_.has(data, 1); }
  void run(std::span<const LtUse> uses, void*,
           std::function<void(const std::vector<const void*>& where)> compute) override {
    std::vector<const void*> where;
    for (const LtUse& use : uses) {
      check(!use.data || memory_.has(use.data, use.bytes), "cuBLASLt: ", use.what, " of ", use.bytes,
            " bytes is not memory of the device");
      where.push_back(use.data);
    }
    compute(where);
  }

 private:
  DeviceMemory& memory_;
};

/// Products on a machine with the stand-in.
class LtCases : public ProductCases {
 public:
  explicit LtCases(uint64_t seed, const Machine& machine = chip(90))
      : ProductCases(seed), place_(twins().device.memory()) {
    state.place = &place_;
    pretend(machine);
  }

  void pretend(const Machine& machine) {
    state.machine = machine;
    if (!on_gpu()) twins().device.pretend(machine, machine.cublaslt ? &lt_stand_in(state) : nullptr);
  }

  /// Why the row refuses; empty if it does not.
  std::string refusal(const GemmProblem& p, std::string_view name = "cublaslt") {
    for (const KernelRow<GemmProblem>& row : kernels<GemmProblem>(twins().device)) {
      Refusal why;
      if (row.name == name) return row.takes(p, twins().device, &why) ? "" : why.why;
    }
    return "there is no such row";
  }

  LtState state;

 private:
  LtOnEmulator place_;
};

}  // namespace quire::testing
