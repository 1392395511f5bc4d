// The list of operators. The only translation unit that includes autograd headers.
#include <torch/library.h>

#include "quire/info/info.h"
#include "quire/runner/arena.h"
#include "quire/runner/registry.h"
#include "quire_torch/bridge/parallel.h"
#include "quire_torch/op/op.h"
#include "quire_torch/ops/activation.h"
#include "quire_torch/ops/debug.h"
#include "quire_torch/ops/delayed.h"
#include "quire_torch/ops/grouped_linear.h"
#include "quire_torch/ops/grouped_quantize.h"
#include "quire_torch/ops/linear.h"
#include "quire_torch/ops/norm.h"
#include "quire_torch/ops/observe.h"
#include "quire_torch/ops/permute.h"
#include "quire_torch/ops/quantize_through.h"
#include "quire_torch/ops/recorder.h"
#include "quire_torch/ops/register_runner.h"
#include "quire_torch/ops/route.h"
#include "quire_torch/ops/runner.h"
#include "quire_torch/ops/state.h"
#include "quire_torch/ops/tensor_runner.h"

namespace quire_torch {
namespace {

std::string canonical_spec(c10::string_view text) { return quire::QuantSpec::parse(text).to_string(); }
bool in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }
std::string spec_grammar() { return quire::spec_grammar(); }

void register_operators(torch::Library& m) {
  op::register_outer<Linear>(m);
  op::register_outer<LinearGiven>(m);
  op::register_inner<LinearFwd>(m);
  op::register_inner<LinearBwd>(m);
  op::register_outer<GroupedLinear>(m);
  op::register_inner<GroupedLinearFwd>(m);
  op::register_inner<GroupedLinearBwd>(m);
  op::register_inner<GroupedPlainBwd>(m);
  op::register_inner<GroupedQuantize>(m);
  op::register_inner<GroupedDequantize>(m);
  op::register_mutation<GroupedWgrad>(m);
  op::register_mutation<GroupedAccumulate>(m);
  op::register_mutation<Wgrad>(m);
  op::register_mutation<Accumulate>(m);
  op::register_mutation<SrAdvance>(m);
  op::register_mutation<DelayedCollect>(m);
  op::register_mutation<DelayedUpdate>(m);
  op::register_mutation<AmaxMax>(m);
  op::register_mutation<WgradStash>(m);
  op::register_outer<Norm>(m);
  op::register_inner<NormFwd>(m);
  op::register_inner<NormBwd>(m);
  op::register_outer<Activation>(m);
  op::register_inner<ActivationFwd>(m);
  op::register_inner<ActivationBwd>(m);
  op::register_outer<Route>(m);
  op::register_inner<RouteFwd>(m);
  op::register_inner<RouteBwd>(m);
  op::register_inner<LimitCapacity>(m);
  op::register_inner<ExpertRows>(m);
  op::register_inner<ChunkRows>(m);
  op::register_outer<Permute>(m);
  op::register_inner<PermuteFwd>(m);
  op::register_outer<Unpermute>(m);
  op::register_inner<UnpermuteFwd>(m);
  op::register_inner<UnpermuteDot>(m);
  op::register_outer<QuantizeThrough>(m);
  op::register_inner<Quantize>(m);
  op::register_inner<Fingerprint>(m);
  op::register_inner<Dequantize>(m);
  op::register_inner<Reorder>(m);
  op::register_inner<EmptyQuantized>(m);
  op::register_inner<Nvfp4Linear<c10::SymInt>>(m);
  op::register_inner<Nvfp4Linear<RunnerNameText>>(m);
  op::register_inner<Nvfp4Moe<c10::SymInt>>(m);
  op::register_inner<Nvfp4Moe<RunnerNameText>>(m);
  op::register_inner<Nvfp4MoeRouted<c10::SymInt>>(m);
  op::register_inner<Nvfp4MoeRouted<RunnerNameText>>(m);
  op::register_inner<DebugCast>(m);
  op::register_inner<DebugRht>(m);
  op::register_inner<DebugSwizzle>(m);
  op::register_inner<DebugUnswizzle>(m);
  op::register_inner<DebugPhilox>(m);
  op::register_inner<DebugDelayedUpdate>(m);
}

/// Functions of plain values, for Python only.
void register_functions(torch::Library& m) {
  m.def("canonical_spec(str spec) -> str", canonical_spec);
  m.def("spec_grammar() -> str", spec_grammar);
  m.def("wgrad_take_(Tensor(a!) stash) -> (Tensor[] operands, int tokens, str recipe, bool overwrite)", take_stashed);
  m.def("wgrad_drop(int number) -> ()", drop_stashed);
  // Its kernel is Python's (quire/delayed/update.py): delayed_update_ of both directions, with the user's functions.
  m.def(
      "delayed_update_in_python_(Tensor(a!)[] history, Tensor(b!)[] scale, Tensor(c!)[] amax, Tensor(d!)[] usage) -> "
      "()",
      {at::Tag::pt2_compliant_tag});
  m.def("in_backward() -> bool", in_backward);
  m.def("isas() -> str", quire::explain_isas);
  m.def("kernel_tables() -> str", quire::kernel_tables);
  m.def("spec_families() -> str", quire::explain_families);
  m.def("explain_begin() -> ()", begin_explanation);
  m.def("explain_note(str step) -> ()", note_step);
  m.def("explain_end() -> str", end_explanation);
  m.def("debug_count(bool on) -> ()", set_counting);
  m.def("debug_counted() -> str", counted);
  m.def("debug_record(bool on) -> ()", set_recording);
  m.def("debug_recorded() -> Tensor[]", recorded_buffers);
  m.def("debug_recorded_text() -> str", recorded_text);
}

/// What quire.runners is made of.
void register_runner_functions(torch::Library& m) {
  op::register_value<RegisterLinearRunner>(m);
  op::register_value<RegisterMoeRunner>(m);
  op::register_value<RegisterPythonRunner>(m);
  m.def("runner_unregister(int handle) -> ()", quire::unregister_runner);
  m.def("runner_list() -> str", list_runners);
  m.def("runner_dropped_functions() -> int[]", dropped_python_functions);
  m.def("runner_release_memory() -> ()", quire::release_idle_arenas);
  m.def("runner_call_python(int function, Tensor[] inputs) -> Tensor");  // its kernel is Python's: PythonRunner
}

}  // namespace
}  // namespace quire_torch

TORCH_LIBRARY(quire, m) {
  quire_torch::install_executor();
  quire_torch::register_operators(m);
  quire_torch::register_functions(m);
  quire_torch::register_runner_functions(m);
}
