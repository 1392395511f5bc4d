// Errors in the values of tensors, which only kernels read: what a kernel reports, and the error that the host makes of
// it. On the host a kernel throws at once. A kernel of another device writes a FaultRecord, and the host throws at its
// next call on that device, or once it has waited for it.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "quire/base/check.h"

namespace quire {

/// Rules that values obey. kRuleTexts (fault.cpp) has a row for each, in this order.
enum class ValueRule : uint32_t {
  none,
  given_scale,
  given_amax,
  group_end,
  group_room,
  expert_id,
  chosen_expert,
  row_map,
  row_once,
  chunk_size,
  chunk_order,
  chunk_rows,
  stale_codes,
  history_length,
};

/// The numbers of an error. What each means is in the rule's text.
struct Fault {
  int64_t index = 0;                 ///< where in the tensor
  int64_t value = 0;                 ///< what is there; or,
  double number = 0;                 ///< if it is no integer, this
  int64_t limit = 0;                 ///< what the value must not exceed, or reach
  std::array<int64_t, 3> more = {};  ///< further numbers
};

/// Memory of a device that its kernels write and the host reads without waiting, such as pinned memory. Plain data. Of
/// kernels that report at the same time one is heard: the one that changes the claim from `heard` to `heard + 1`
/// (atomicCAS). It writes the fault and the operation, then makes them visible to the host (__threadfence_system), then
/// writes `rule`.
struct FaultRecord {
  static constexpr size_t kOperation = 128;

  uint32_t heard = 0;  ///< faults that the host has raised; the host alone writes it
  uint32_t rule = 0;   ///< a ValueRule; not `none`: the rest is complete
  uint32_t own_claim = 0;
  /// The claim, in memory of the device. A GPU's atomic operation on memory of the host is an error where the bus does
  /// not carry it. Null: own_claim, of kernels that run on threads of this process.
  uint32_t* claim = nullptr;
  Fault fault = {};
  std::array<char, kOperation> operation = {};  ///< ends with 0; longer ones are cut
};

/// The error of a value that breaks a rule, with what a device needs to report it.
struct FaultError : Error {
  FaultError(std::string_view operation, ValueRule rule, const Fault& fault);
  std::string operation;
  ValueRule rule;
  Fault fault;
};

/// For kernels of the host: throws FaultError. operation: "OP", or "OP: what" with what of it is meant.
[[noreturn]] void raise(std::string_view operation, ValueRule rule, const Fault& fault);

/// The text of an error, the same on every device.
std::string describe(std::string_view operation, ValueRule rule, const Fault& fault);

/// For kernels that run on threads of this process: writes the record, unless another fault is in it.
void report(FaultRecord& record, std::string_view operation, ValueRule rule, const Fault& fault);

/// Throws FaultError if a kernel has written the record, which is then free again.
void raise_reported(FaultRecord& record);

struct RuleText {
  ValueRule rule;
  std::string_view name;
  std::string_view text;  ///< follows the operation; {NAME} stands for a number
};
/// All rules but `none`.
std::span<const RuleText> rule_texts();

}  // namespace quire
