// A mixture of experts from weights that were quantized once.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "quire/runner/prepared_weight.h"
#include "quire/runner/runner.h"
#include "quire/spec/activation.h"

namespace quire {

/// One expert, out = f(x w13^T) w2^T: w13 [2 I, H], or [I, H] where f is not gated, and w2 [H, I]. w13 holds the rows
/// of the gate, to which the curve of f is applied, before those of its factor: [gate, up], the order of checkpoints.
struct Expert {
  PreparedWeight w13, w2;
};

struct MoeOptions {
  InputSpec x;                   ///< how inputs and activations are quantized, each expert's rows for themselves
  Activation activation;         ///< such as Activation::parse("swiglu")
  bool weight_on_input = false;  ///< weights multiply x instead of the expert's result
};

/// permute(); for every expert, its rows: quantized, times w13; the activation; quantized, times w2; unpermute(). What
/// is between stages, and each expert's result, is rounded to x's dtype. No expert sees another's rows, and nothing
/// depends on the number of threads. A shared expert has all tokens, unweighted; its result is added to the combined
/// one, rounded once more. Without a spec of x the decoded weights are multiplied, one expert after the other, because
/// the library that multiplies (device/library.h) has threads of its own.
class MoeRunner final : public Runner {
 public:
  /// Throws Error unless there is an expert, all have the same sizes, fitting each other and the activation, and the
  /// shared one, whose I may be another, fits them.
  MoeRunner(std::vector<Expert> experts, const MoeOptions& options, std::optional<Expert> shared = {});

  /// Takes memory by the number of tokens and choices, not by where they go.
  void run(const RunnerCall& call) override;

 private:
  struct Task;
  struct Routes;
  void run_all(const RunnerCall& call, std::span<const Task> tasks, Arena& arena) const;
  void run_task(const Task& task, Context context) const;
  void run_unquantized(const Task& task, const Context& context) const;
  Task shared_task(const RunnerCall& call, Arena& arena) const;
  std::span<Task> tasks(const RunnerCall& call, const Routes& routes, Arena& arena) const;

  std::vector<Expert> experts_;
  std::optional<Expert> shared_;
  MoeOptions options_;
};

}  // namespace quire
