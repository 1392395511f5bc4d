// The list of debug operators.
#include <torch/library.h>

#include "quire_debug/debug.h"
#include "quire_torch/op/op.h"

TORCH_LIBRARY_FRAGMENT(quire, m) {
  namespace op = quire_torch::op;
  op::register_inner<quire_torch::DebugCast>(m);
  op::register_inner<quire_torch::DebugRht>(m);
  op::register_inner<quire_torch::DebugSwizzle>(m);
  op::register_inner<quire_torch::DebugUnswizzle>(m);
  op::register_inner<quire_torch::DebugPhilox>(m);
  op::register_inner<quire_torch::DebugDelayedUpdate>(m);
}
