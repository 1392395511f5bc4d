#include "quire/runner/linear_runner.h"

#include <utility>

#include "quire/base/check.h"

namespace quire {

LinearRunner::LinearRunner(PreparedWeight weight, const QuantSpec& x)
    : Runner({.kind = RunnerKind::linear,
              .in_features = weight.in_features(),
              .out_features = weight.out_features(),
              .description = text("x=", x.to_string(), ",w=", weight.spec().to_string())}),
      weight_(std::move(weight)),
      x_(x) {
  weight_.check_input_spec(x);
}

void LinearRunner::run(const RunnerCall& call) {
  const HeldArena arena;
  const Stages stages{call.observer};
  const Side codes = arena->take_rowwise(x_, call.x.rows, call.x.cols);
  stages.quantize(weight_.quantization(call.x, x_, codes));
  stages.gemm("fprop", weight_.product(codes, x_, call.out));
}

}  // namespace quire
