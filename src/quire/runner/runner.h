// What computes behind an operator that names it by a number or a name: the interface of runners, quire's own and those
// of other libraries. docs/runners.md is the page for those who write one.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "quire/base/context.h"
#include "quire/base/matrix.h"

namespace quire {

enum class RunnerKind : uint8_t { linear, moe };

constexpr std::string_view name(RunnerKind kind) { return kind == RunnerKind::linear ? "linear" : "moe"; }

/// What a runner computes and of which sizes. Does not change while the runner lives.
struct RunnerInfo {
  RunnerKind kind = RunnerKind::linear;
  std::string device = "cpu";  ///< where the memory of its calls lies: "cpu", "cuda:0"
  int64_t in_features = 0;     ///< K of x [T, K]
  int64_t out_features = 0;    ///< N of out [T, N]
  int64_t experts = 0;         ///< E of a mixture of experts
  std::string description{};   ///< one line for listings, such as its formats
};

/// One call: out [T, N] of x [T, K], T >= 1. Its memory lies on the runner's device and is lent until run() returns; on
/// another device than the host, for what run() puts on the context's stream.
struct RunnerCall {
  Matrix x;
  MutableMatrix out;
  const int32_t* expert_ids = nullptr;    ///< moe: [T, top_k], contiguous; an expert below E, or -1 for none
  const float* expert_weights = nullptr;  ///< moe: [T, top_k], contiguous; the weight of each expert's result
  int64_t top_k = 0;                      ///< moe: 1 <= top_k <= E
  /// Where to run: device, stream, memory for the time of the call. Without a device: the host. With batch_invariant
  /// the bits of a token must not depend on the other tokens; a runner that cannot do that throws.
  Context context{};
};

class Storage;

/// Owns prepared weights and computes with them.
class Runner {
 public:
  explicit Runner(RunnerInfo info) : info_(std::move(info)) {}
  virtual ~Runner() = default;
  Runner(const Runner&) = delete;
  Runner& operator=(const Runner&) = delete;

  const RunnerInfo& info() const { return info_; }

  /// Writes all of call.out. The call fits info(): operators have checked it. Several threads may be inside at once.
  /// What it throws reaches the operator's caller. For capture in CUDA graphs: no allocation from the device once
  /// calls of this size have been made, and no wait for the device.
  virtual void run(const RunnerCall& call) = 0;

  /// Copies the weights of a runner of the same kind and form into the memory that this one has, so that captured
  /// graphs stay valid. No call may run at the same time. Throws Error, with nothing changed, if the form differs, and
  /// for runners that cannot.
  virtual void take(const Runner& other, const Storage& storage);

 private:
  RunnerInfo info_;
};

}  // namespace quire
