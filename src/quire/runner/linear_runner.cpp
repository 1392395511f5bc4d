#include "quire/runner/linear_runner.h"

#include <utility>

#include "quire/base/check.h"
#include "quire/operations/operations.h"

namespace quire {

LinearRunner::LinearRunner(PreparedWeight weight, const InputSpec& x)
    : Runner({.kind = RunnerKind::linear,
              .device = weight.place(),
              .in_features = weight.in_features(),
              .out_features = weight.out_features(),
              .description = text("x=", x.to_string(), ",w=", weight.spec().to_string())}),
      weight_(std::move(weight)),
      x_(x) {
  check(weight_.count() == 1, "runner: a linear runner has one weight, got ", weight_.count());
  weight_.check_input_spec(x);
}

void LinearRunner::run(const RunnerCall& call) {
  if (call.context.batch_invariant) weight_.check_tokens_alone(x_);
  const RowGroups all{.rows = call.x.rows};
  if (!x_) return matmul(weight_.plain_product(call.x, all, call.out), call.context);
  CallMemory memory;
  const PlannedCodes planned(memory, *x_, {call.x.rows, call.x.cols}, 0);
  memory.lend(call.context);
  const RowCodes codes = planned.in(memory, all);
  quantize(weight_.quantization(call.x, *x_, codes), call.context);
  gemm(weight_.product(codes, *x_, call.out, "fprop"), call.context);
}

void LinearRunner::take(const Runner& other, const Storage& storage) {
  const auto* const from = dynamic_cast<const LinearRunner*>(&other);
  check(from != nullptr && from->x_.to_string() == x_.to_string(),
        "runner: a linear runner takes the weight of another one with the same x; this is ", info().description,
        ", got ", other.info().description);
  weight_.check_taken(from->weight_, "the weight");
  weight_.take(from->weight_, storage);
}

}  // namespace quire
