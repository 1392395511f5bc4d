// The list of operators. The only translation unit that includes autograd headers.
#include "quire_torch/library.h"

#include <torch/library.h>

#include "quire/device/device.h"
#include "quire/device/warning.h"
#include "quire/info/info.h"
#include "quire/runner/registry.h"
#include "quire_torch/bridge/collectives.h"
#include "quire_torch/bridge/context.h"
#include "quire_torch/bridge/matmul.h"
#include "quire_torch/bridge/observe.h"
#include "quire_torch/bridge/parallel.h"
#include "quire_torch/bridge/records.h"
#include "quire_torch/op/op.h"
#include "quire_torch/ops/agree.h"
#include "quire_torch/ops/delayed.h"
#include "quire_torch/ops/grouped_linear.h"
#include "quire_torch/ops/grouped_quantize.h"
#include "quire_torch/ops/linear_grads.h"
#include "quire_torch/ops/parallel_groups.h"
#include "quire_torch/ops/parallel_linear.h"
#include "quire_torch/ops/permute.h"
#include "quire_torch/ops/pointwise.h"
#include "quire_torch/ops/quantize_through.h"
#include "quire_torch/ops/register_runner.h"
#include "quire_torch/ops/route.h"
#include "quire_torch/ops/runner.h"
#include "quire_torch/ops/state.h"
#include "quire_torch/ops/sum_gradient.h"
#include "quire_torch/ops/tensor_runner.h"
#include "quire_torch/ops/wgrad.h"

namespace quire_torch {

bool in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

namespace {

std::string canonical_spec(c10::string_view text) { return quire::QuantSpec::parse(text).to_string(); }
std::string canonical_recipe(c10::string_view text) { return quire::LinearSpec::parse(text).to_string(); }
std::string canonical_parallel(c10::string_view text) { return Parallel::parse(text).to_string(); }
void next_caller(c10::string_view layer) { set_next_caller(layer); }
std::string spec_grammar() { return quire::spec_grammar(); }
std::string kernel_tables(c10::string_view device) { return quire::kernel_tables(device); }
std::string absence_of(c10::string_view device) { return std::string(quire::absence_of(device)); }

template <class... Ops>
struct Operators {
  static void register_outer(torch::Library& m) { (op::register_outer<Ops>(m), ...); }
  static void register_inner(torch::Library& m) { (op::register_inner<Ops>(m), ...); }
  static void register_mutations(torch::Library& m) { (op::register_mutation<Ops>(m), ...); }
  static void implement_kernels(torch::Library& m, c10::DispatchKey key) { op::implement_kernels<Ops...>(m, key); }
};

/// What users call, and is differentiable.
using Outer = Operators<Linear, LinearPrequantized, GroupedLinear, ParallelLinear, ParallelGroupedLinear, SumGradient,
                        Norm, Activation, Route, Permute, Unpermute, QuantizeThrough>;
/// What those call: with kernels for every device that the core knows.
using Inner = Operators<LinearFwd, LinearBwd, LinearDgrad, LinearWgrad, Tie, LinearUnquantizedBwd, GroupedQuantize,
                        GroupedAmax, GroupedDequantize, NormFwd, NormBwd, ActivationFwd, ActivationBwd, RouteFwd,
                        RouteBwd, LimitCapacity, ExpertRows, ChunkRows, PermuteFwd, UnpermuteFwd, UnpermuteDot,
                        Quantize, Amax, Fingerprint, Dequantize, Reorder, EmptyQuantized>;
using Mutations =
    Operators<Wgrad<at::Tensor>, Wgrad<op::TensorList>, Accumulate<at::Tensor>, Accumulate<op::TensorList>, Agree,
              AgreeOn, SrAdvance, DelayedCollect, DelayedUpdate, AmaxMax, WgradStash>;
/// Those that name a runner: of the device where its weights lie.
using Runners = Operators<Nvfp4Linear<c10::SymInt>, Nvfp4Linear<RunnerNameText>, Nvfp4Moe<c10::SymInt>,
                          Nvfp4Moe<RunnerNameText>, Nvfp4MoeRouted<c10::SymInt>, Nvfp4MoeRouted<RunnerNameText>>;

/// Functions of plain values, for Python only.
void register_functions(torch::Library& m) {
  m.def("canonical_spec(str spec) -> str", canonical_spec);
  m.def("canonical_recipe(str recipe) -> str", canonical_recipe);
  m.def("canonical_parallel(str parallel) -> str", canonical_parallel);
  m.def("spec_grammar() -> str", spec_grammar);
  m.def("activations() -> str", quire::activation_table);
  m.def("quantize_weight_part(Tensor w, str spec, str parallel) -> Tensor[]", quantize_weight_part);
  m.def("wgrad_take_(Tensor(a!) stash) -> (Tensor[] operands, int tokens, str recipe, bool overwrite)", take_stashed);
  m.def("wgrad_drop(int number) -> ()", drop_stashed);
  // Its kernel is Python's (quire/delayed/step.py): delayed_update_ of both directions, with the user's functions.
  m.def(
      "delayed_update_in_python_(Tensor(a!)[] history, Tensor(b!)[] scale, Tensor(c!)[] amax, Tensor(d!)[] usage) -> "
      "()",
      {at::Tag::pt2_compliant_tag});
  m.def("delayed_collections() -> int", delayed_collections);
  m.def("in_backward() -> bool", in_backward);
  m.def("next_caller(str layer) -> ()", next_caller);
  m.def("saved_states(Tensor[] states) -> ()");  // its kernel is Python's: op/autograd.h says what it is for
  // Python's (quire/distributed/check_ranks.py): whether gloo sends the tensors of a device for a group, and what
  // compares what its ranks are about to send.
  m.def("sent_by_gloo(str group, str device) -> bool");
  m.def("compare_ranks(str group, int tokens, int[] weight, str recipe, str parallel) -> ()");
  m.def("compare_fields(str group, str fields) -> ()");
  m.def("forget_agreed(str group) -> ()", forget_agreed);
  m.def("raise_reported(str device) -> ()", [](const std::string& device) { raise_reported(at::Device(device)); });
  m.def("isas() -> str", quire::explain_isas);
  m.def("kernel_tables(str device) -> str", kernel_tables);
  m.def("absence_of(str device) -> str", absence_of);
  m.def("spec_families() -> str", quire::explain_families);
  m.def("explain_begin() -> ()", begin_explanation);
  m.def("explain_note(str step) -> ()", note_step);
  m.def("explain_end() -> str", end_explanation);
  m.def("debug_count(bool on) -> ()", set_counting);
  m.def("debug_count_for(str layer) -> ()", counting_for);
  m.def("debug_counted() -> str", counted);
  m.def("debug_record(bool on) -> ()", set_observing_operands);
  m.def("debug_recorded() -> Tensor[]", recorded_buffers);
  m.def("debug_recorded_text() -> str", recorded_text);
}

/// What quire.runners is made of.
void register_runner_functions(torch::Library& m) {
  op::register_value<RegisterLinearRunner>(m);
  op::register_value<RegisterMoeRunner>(m);
  op::register_value<RegisterPythonRunner>(m);
  m.def("runner_take(int handle, int source) -> ()", take_weights);
  m.def("runner_unregister(int handle) -> ()", quire::unregister_runner);
  m.def("runner_list() -> str", list_runners);
  m.def("runner_dropped_functions() -> int[]", dropped_python_functions);
  m.def("runner_call_python(int function, Tensor[] inputs) -> Tensor");  // its kernel is Python's: PythonRunner
}

}  // namespace

void implement_kernels(torch::Library& m, c10::DispatchKey key) {
  Inner::implement_kernels(m, key);
  Mutations::implement_kernels(m, key);
  Runners::implement_kernels(m, key);
}

}  // namespace quire_torch

TORCH_LIBRARY(quire, m) {
  quire_torch::install_executor();
  quire_torch::install_matmul();
  quire::set_warn([](const std::string& text) { TORCH_WARN(text); });
  quire_torch::Outer::register_outer(m);
  quire_torch::Inner::register_inner(m);
  quire_torch::Mutations::register_mutations(m);
  quire_torch::Runners::register_inner(m);
  quire_torch::register_functions(m);
  quire_torch::register_runner_functions(m);
}

// One libquire_torch serves builds of PyTorch with CUDA and without: the kernels lie in libquire_cuda, which the first
// CUDA tensor opens.
TORCH_LIBRARY_IMPL(quire, CUDA, m) { quire_torch::implement_kernels(m, c10::DispatchKey::CUDA); }
