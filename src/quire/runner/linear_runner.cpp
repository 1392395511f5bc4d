#include "quire/runner/linear_runner.h"

#include <utility>

#include "quire/base/check.h"

namespace quire {

void check_activation_spec(const QuantSpec& x) {
  check(!x.stochastic, "runner: activation spec ", x.to_string(),
        " rounds stochastically, which is for gradients; leave sr out");
}

LinearRunner::LinearRunner(PreparedWeight weight, const QuantSpec& x)
    : Runner({.kind = RunnerKind::linear,
              .in_features = weight.in_features(),
              .out_features = weight.out_features(),
              .description = text("x=", x.to_string(), ",w=", weight.spec().to_string())}),
      weight_(std::move(weight)),
      x_(x) {
  check_activation_spec(x);
}

void LinearRunner::run(const RunnerCall& call) {
  const HeldArena arena;
  weight_.multiply(quantize_rowwise(call.x, x_, *arena), call.out);
}

}  // namespace quire
