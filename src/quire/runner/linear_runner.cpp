#include "quire/runner/linear_runner.h"

#include <utility>

#include "quire/base/check.h"
#include "quire/gemm/gemm.h"
#include "quire/quantize/quantize.h"

namespace quire {

LinearRunner::LinearRunner(PreparedWeight weight, const InputSpec& x)
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
  Context context = host();
  context.workspace = &*arena;
  context.observer = call.observer;
  if (!x_) return weight_.multiply(call.x, call.out, context);
  const Side codes = arena->take_rowwise(*x_, call.x.rows, call.x.cols);
  quantize(weight_.quantization(call.x, *x_, codes), context);
  gemm(weight_.product(codes, *x_, call.out, "fprop"), context);
}

}  // namespace quire
