// A mixture of experts from weights that were quantized once.
#pragma once

#include <optional>

#include "quire/runner/prepared_weight.h"
#include "quire/runner/runner.h"
#include "quire/spec/activation.h"

namespace quire {

/// E networks out = f(x w13^T) w2^T: w13 [2 I, H], or [I, H] where f is not gated, and w2 [H, I]. w13 holds the rows of
/// the gate, to which the curve of f is applied, before those of its factor: [gate, up], the order of checkpoints.
struct Experts {
  PreparedWeight w13, w2;
};

struct MoeOptions {
  InputSpec x;                   ///< how inputs and activations are quantized, each expert's rows for themselves
  Activation activation;         ///< such as Activation::parse("swiglu")
  bool weight_on_input = false;  ///< weights multiply x instead of the expert's result
};

/// expert_rows(); permute(); of the rows of each expert, in one problem with a group for each: quantized, times w13;
/// the activation, quantized; times w2; unpermute(). What is between stages, and each expert's result, is rounded to
/// x's dtype. No expert sees another's rows. A shared expert has all tokens, unweighted; its result is added to the
/// combined one, rounded once more. Without a spec of x the decoded weights are multiplied.
class MoeRunner final : public Runner {
 public:
  /// Throws Error unless the sizes of the experts fit each other and the activation, all lie on one device, and the
  /// shared one, which is one, and whose I may be another, fits them.
  MoeRunner(Experts experts, const MoeOptions& options, std::optional<Experts> shared = {});

  /// Takes memory by the number of tokens and choices, not by where they go.
  void run(const RunnerCall& call) override;
  void take(const Runner& other, const Storage& storage) override;

 private:
  struct Planned;
  struct Rows;
  void check_tokens_alone() const;
  Planned plan(CallMemory& memory, const Experts& experts, const Rows& rows) const;
  void compute(const Experts& experts, const Rows& rows, const Planned& planned, const Context& context) const;

  Experts experts_;
  std::optional<Experts> shared_;
  MoeOptions options_;
};

}  // namespace quire
