// Kinds of devices and their kernels: one row each (device.cpp), found by name. What stands above never asks which
// device it is.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <tuple>

#include "quire/base/kernel_table.h"
#include "quire/spec/moe_problem.h"
#include "quire/spec/pointwise_problem.h"
#include "quire/spec/state_problem.h"

namespace quire {

/// Everything that is asked of a device.
template <template <class...> class List>
using ForAllProblems =
    List<QuantizeProblem, AmaxProblem, DequantizeProblem, ReorderProblem, GemmProblem, MatmulProblem, ColumnSumProblem,
         NormProblem, NormGradProblem, ActivationProblem, ActivationGradProblem, RouteProblem, RouteGradProblem,
         CapacityProblem, PermuteProblem, UnpermuteProblem, PermutedDotProblem, ExpertRowsProblem, ChunkRowsProblem,
         FingerprintProblem, AdvanceProblem, MaximumProblem, CollectProblem, DelayedUpdateProblem>;

/// The kernels of one problem, in order of preference.
template <class Problem>
using KernelRows = std::span<const KernelRow<Problem>>;

template <class... Problems>
using RowsOf = std::tuple<KernelRows<Problems>...>;
using KernelTables = ForAllProblems<RowsOf>;

/// A kind of device. Its kernels check nothing: dispatch() does.
struct Device {
  std::string_view name;  ///< as PyTorch calls it: "cpu", "cuda"
  KernelTables kernels;
  /// Where the kernels of the index-th of its kind report values that break a rule (base/fault.h). One for all streams,
  /// for as long as the process lives: captured kernels refer to it. Null: its kernels throw.
  FaultRecord* (*faults)(int index) = nullptr;
  /// Whether a stream of the index-th is being captured. Null: this kind captures none.
  bool (*capturing)(int index, void* stream) = nullptr;
};

/// Whether the pointers of a problem are memory of the host, and its kernels run before the call returns. The only way
/// to ask: a null stream is the default stream of a device.
bool on_host(const Context& context);

/// The device of that name; null if there is none. Kinds that lie in a library of their own, such as "cuda", are opened
/// when they are first asked for.
const Device* find_device(std::string_view name);
/// Why there is no device of that name; empty if there is one.
std::string_view absence_of(std::string_view name);
/// Whether the name is that of a kind of device, which this build or this machine need not have.
bool is_kind_of_device(std::string_view name);

/// Adds a kind of device that is not in device.cpp's table, which must live as long as the process. Throws Error if the
/// name is taken.
void register_device(const Device& device);

/// The kernels that a problem may go to in this context.
template <class Problem>
KernelRows<Problem> kernels(const Context& context = host()) {
  const Device& device = context.device ? *context.device : *host().device;
  return std::get<KernelRows<Problem>>(device.kernels);
}

}  // namespace quire
