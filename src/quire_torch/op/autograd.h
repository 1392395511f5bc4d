// Autograd of outer operators. Besides kNamespace, kName, Args and kResults (op.h) an outer operator has
//   inference(args) -> Results     what it computes when nothing needs a gradient
//   Saved                          what its backward needs: a struct with kFields like Args
//   forward(args, needs) -> {Results, Saved}
//   backward(saved, grads, needs)  one gradient per Tensor, Tensor? or GradientList argument in order, as Tensors<N>.
//                                  That of a list of several tensors has a leading dimension of them.
//                                  grads has one per result, undefined where none arrived; at least one is defined
// and, if only some results have a gradient, kDifferentiable: the number of those, which come first. Its gradients have
// none, and say so, unless kTwiceDifferentiable = true: backward is then made of differentiable functions alone.
// All three compute by calling inner operators (op::call), so that traced graphs hold those.
#pragma once

#include <ATen/core/List.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/headeronly/version.h>

#include <algorithm>

#include "quire/base/check.h"
#include "quire_torch/op/op.h"

namespace quire_torch::op {

/// A field of Saved: a tensor that backward itself may change, such as the counter of a random stream. Held without the
/// version check of saved tensors, which would refuse the second of two backwards.
struct State {
  at::Tensor tensor;
};
/// Several of them.
struct StateList {
  TensorList tensors;
};

namespace detail {

using torch::autograd::variable_list;

template <class Node, class... Parts>
auto make_node(Parts&&... parts) {
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
  // Nodes became intrusive in 2.13; before, deleteNode keeps the release of a long graph from overflowing the stack.
  return std::shared_ptr<Node>(new Node(std::forward<Parts>(parts)...), torch::autograd::deleteNode);
#else
  return c10::make_intrusive<Node>(std::forward<Parts>(parts)...);
#endif
}

/// To a graph that is being traced, an operator that writes a State writes what the graph has saved for backward.
/// Python has that saved by reference too (quire/loading/transforms.py): hooks of saved tensors would give backward a
/// copy.
template <class Saved>
[[gnu::noinline]] void save_states_by_reference(const Saved& saved) {
  c10::List<at::Tensor> states;
  for_each_field<Saved>([&](auto field) {
    using T = typename decltype(field)::Type;
    if constexpr (std::same_as<T, State>) states.push_back((saved.*(field.kMember)).tensor);
    if constexpr (std::same_as<T, StateList>)
      for (const at::Tensor& t : (saved.*(field.kMember)).tensors) states.push_back(t);
  });
  if (states.empty()) return;
  constexpr auto kPythons = c10::DispatchKey::CompositeExplicitAutograd;
  const auto found = c10::Dispatcher::singleton().findSchema({"quire::saved_states", ""});
  if (!found || !found->hasKernelForDispatchKey(kPythons)) return;
  Stack stack{states};
  found->callBoxedForDispatchKey(kPythons, stack);  // past the modes that trace
}

/// The arguments of which one tensor at least is wanted; counts: how many each has, which are numbered through.
template <size_t N, class Wanted>
Needs needs_of(const std::array<size_t, N>& counts, const Wanted& wanted) {
  Needs needs;
  for (size_t i = 0, edge = 0; i < N; ++i)
    for (size_t j = 0; j < counts[i]; ++j, ++edge)
      if (wanted(edge)) needs.set(i);
  return needs;
}

/// A call of Op in the autograd graph: its Saved, whose tensors are moved into saved variables.
template <class Op>
class TypedNode : public torch::autograd::Node {
 public:
  using Saved = typename Op::Saved;
  static constexpr size_t kInputs =
      count_fields<typename Op::Args>([]<class T>(std::type_identity<T>) { return HasGradient<T>; });
  using Counts = std::array<size_t, kInputs>;

  /// counts: tensors of each argument, 1 but for lists.
  explicit TypedNode(const Counts& counts) : counts_(counts) {}

  std::string name() const override { return std::string(Op::kNamespace) + "::" + Op::kName + "_backward"; }

  /// To be called when the results have their history: a saved result must not keep its own node alive.
  void save(Saved&& saved, const Results<Op>& results) {
    if (c10::impl::TorchDispatchModeTLS::any_modes_set()) save_states_by_reference(saved);
    saved_.emplace(std::move(saved));
    for_each_tensor(*saved_, [&](at::Tensor& t) {
      const bool is_result = std::any_of(results.begin(), results.end(), [&](const auto& r) { return r.is_same(t); });
      tensors_.push_back({torch::autograd::SavedVariable(t, is_result), is_result});
      t.reset();
    });
  }

  variable_list apply(variable_list&& arrived) override {
    const Saved saved = unpack();
    variable_list out(num_outputs());
    if (std::none_of(arrived.begin(), arrived.end(), [](const at::Tensor& g) { return g.defined(); })) return out;
    Results<Op> grads;
    std::copy(arrived.begin(), arrived.end(), grads.begin());
    const Needs needs = needs_of(counts_, [&](size_t edge) { return task_should_compute_output(edge); });
    const bool differentiated_again = c10::GradMode::is_enabled() && !kTwice;  // create_graph=True
    {
      const c10::AutoGradMode record(c10::GradMode::is_enabled() && kTwice);
      deliver(Op::backward(saved, std::as_const(grads), needs), needs, out);
    }
    if (differentiated_again) refuse_derivative(arrived, out);
    return out;
  }

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    saved_.reset();
    tensors_.clear();
  }

  /// Compiled autograd: tensors and symbolic integers become inputs of its graph, all else part of its cache key.
  void compiled_args(torch::autograd::CompiledNodeArgs& args) const override {
    TORCH_CHECK(saved_, torch::autograd::ERR_BACKWARD_TWICE);
    for (const SavedTensor& t : tensors_) args.collect(t.variable, t.is_result);
    for_each_field<Saved>([&](auto field) { collect(args, (*saved_).*(field.kMember)); });
  }

  variable_list apply_with_saved(const variable_list& grads, torch::autograd::SwapSavedVariables& swap) override {
    for_each_traced([&](auto& value) { swap.before(value); });
    variable_list out = apply(where_results_are(grads));
    for_each_traced([&](auto& value) { swap.after(value); });
    return out;
  }

 private:
  struct SavedTensor {
    torch::autograd::SavedVariable variable;
    bool is_result;
  };

  /// While compiled autograd traces, what a node of PyTorch gives as a gradient is a placeholder on the CPU. No
  /// operator takes tensors of two devices.
  variable_list where_results_are(variable_list grads) const {
    for (size_t i = 0; i < grads.size(); ++i)
      if (grads[i].defined()) grads[i] = grads[i].to(input_metadata(i).device());
    return grads;
  }

  /// Whether backward may record a graph of its own.
  static constexpr bool kTwice = requires { requires Op::kTwiceDifferentiable; };

  /// Gives the gradients a history that throws. Connected to the inputs of the forward call, which the gradients depend
  /// on, and not only to the gradients that arrived: those may be constant, and a derivative would then be zero without
  /// a word. Aliases get it, because backward may return a tensor that it was given.
  void refuse_derivative(const variable_list& arrived, variable_list& out) {
    torch::autograd::edge_list edges = torch::autograd::collect_next_edges(arrived);
    edges.insert(edges.end(), next_edges().begin(), next_edges().end());
    const auto error = make_node<torch::autograd::Error>(
        c10::str(name(), " has no gradient: ", Op::kNamespace, "::", Op::kName, kOnceDifferentiable), std::move(edges));
    for (at::Tensor& t : out) {
      if (!t.defined()) continue;
      t = t.detach();
      torch::autograd::set_history(t, error);
    }
  }

  void deliver(Tensors<kInputs>&& computed, Needs needs, variable_list& out) const {
    size_t i = 0, edge = 0;
    for_each_field<typename Op::Args>([&](auto field) {
      using T = typename decltype(field)::Type;
      if constexpr (HasGradient<T>) {
        if constexpr (SingleTensor<T>) {
          if (needs[i]) out[edge] = std::move(computed[i]);
        } else if (needs[i] && computed[i].defined()) {
          std::vector<at::Tensor> parts = counts_[i] == 1 ? std::vector{computed[i]} : computed[i].unbind();
          quire::check(parts.size() == counts_[i], Op::kName, ": a list of ", counts_[i], " tensors has ", parts.size(),
                       " gradients; report this, the operator should have refused the list");
          std::move(parts.begin(), parts.end(), out.begin() + static_cast<ptrdiff_t>(edge));
        }
        edge += counts_[i++];
      }
    });
  }

  Saved unpack() {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(saved_, torch::autograd::ERR_BACKWARD_TWICE);
    Saved saved = *saved_;
    auto next = tensors_.begin();
    for_each_tensor(saved, [&](at::Tensor& t) {
      t = next->variable.unpack(next->is_result ? getptr() : nullptr);
      ++next;
    });
    return saved;
  }

  template <class F>
  void for_each_traced(F&& f) {
    for (SavedTensor& t : tensors_) f(t.variable);
    for_each_field<Saved>([&](auto field) {
      using T = typename decltype(field)::Type;
      if constexpr (std::same_as<T, State>) f(((*saved_).*(field.kMember)).tensor);
      if constexpr (std::same_as<T, StateList>)
        for (at::Tensor& t : ((*saved_).*(field.kMember)).tensors) f(t);
      if constexpr (OneOf<T, c10::SymInt, std::vector<c10::SymInt>>) f((*saved_).*(field.kMember));
    });
  }

  template <class Args, class T>
  static void collect(Args& args, const T& value) {
    if constexpr (std::same_as<T, State>) {
      args.collect(value.tensor);
    } else if constexpr (std::same_as<T, StateList>) {
      args.collect(static_cast<uint64_t>(value.tensors.size()));
      for (const at::Tensor& t : value.tensors) args.collect(t);
    } else if constexpr (std::same_as<T, OptionalTensor>) {
      args.collect(value.has_value());
    } else if constexpr (std::same_as<T, GradientList>) {
      collect(args, value.tensors);
    } else if constexpr (SeveralTensors<T>) {
      args.collect(static_cast<uint64_t>(value.size()));
      for (const auto& element : value) collect(args, element);
    } else if constexpr (Textual<T>) {
      args.collect(std::string(value.text()));
    } else if constexpr (!std::same_as<T, at::Tensor>) {
      args.collect(value);
    }
  }

  const Counts counts_;
  std::optional<Saved> saved_;  // its tensors are undefined; empty once released
  std::vector<SavedTensor> tensors_;
};

/// The inputs of the node: the tensors of its arguments in order, undefined where absent; and how many each has.
template <class Op>
variable_list node_inputs(const typename Op::Args& args, typename TypedNode<Op>::Counts& counts) {
  variable_list inputs;
  size_t i = 0;
  for_each_field<typename Op::Args>([&](auto field) {
    using T = typename decltype(field)::Type;
    const size_t before = inputs.size();
    if (HasGradient<T> && SingleTensor<T>) inputs.emplace_back();
    for_each_tensor_of(args.*(field.kMember), [&](const at::Tensor& t) {
      TORCH_CHECK(HasGradient<T> || !t.defined() || !t.requires_grad(), Op::kNamespace, "::", Op::kName, ": ",
                  SingleTensor<T> ? "" : "tensors of the list ", field.name,
                  SingleTensor<T> ? " is written and gets no gradient; pass it detached"
                                  : " have no gradient; pass them detached");
      if constexpr (!HasGradient<T>) {
        return;
      } else if constexpr (SingleTensor<T>) {
        inputs.back() = t;
      } else {
        inputs.push_back(t);
      }
    });
    if constexpr (HasGradient<T>) counts[i++] = inputs.size() - before;
  });
  return inputs;
}

/// How many results have a gradient if their dtype can.
template <class Op>
consteval size_t differentiable_results() {
  if constexpr (requires { Op::kDifferentiable; }) {
    return Op::kDifferentiable;
  } else {
    return Op::kResults.size();
  }
}

template <class Op>
Results<Op> record(const typename Op::Args& args) {
  typename TypedNode<Op>::Counts counts{};
  const variable_list inputs = node_inputs<Op>(args, counts);
  const Needs needs =
      needs_of(counts, [&](size_t edge) { return inputs[edge].defined() && inputs[edge].requires_grad(); });
  std::pair<Results<Op>, typename Op::Saved> computed = [&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    return check_memory<Op>(args), Op::forward(args, needs);
  }();
  auto node = make_node<TypedNode<Op>>(counts);
  node->set_next_edges(torch::autograd::collect_next_edges(inputs));
  for (size_t i = 0; i < computed.first.size(); ++i) {
    at::Tensor& result = computed.first[i];
    if (i < differentiable_results<Op>() && result.defined() && at::isFloatingType(result.scalar_type())) {
      torch::autograd::set_history(result, node);
    } else {
      node->add_input_metadata(torch::autograd::Node::undefined_input());  // keeps grads[i] the gradient of result i
    }
  }
  node->save(std::move(computed.second), computed.first);
  return std::move(computed.first);
}

/// What it computes where nothing needs a gradient.
template <class Op>
Results<Op> infer(const typename Op::Args& args) {
  check_memory<Op>(args);
  return Op::inference(args);
}

template <class Op>
void autograd_of_outer(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  if (!wants_gradient(op, *stack)) return op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
  boxed<Op, &record<Op>>(op, keys, stack);
}

/// The error node stays connected to the inputs. torch::autograd::DelayedError would cut the edges, and
/// torch.autograd.grad(..., allow_unused=True) would then report an unused input instead of raising.
inline void attach_error(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack, const char* reason) {
  variable_list inputs;
  for_each_tensor_in(torch::jit::last(*stack, op.schema().arguments().size()),
                     [&](const at::Tensor& t) { inputs.push_back(t); });
  auto error = make_node<torch::autograd::Error>(c10::toString(op.operator_name()) + " " + reason,
                                                 torch::autograd::collect_next_edges(inputs));
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
  for_each_tensor_in(torch::jit::last(*stack, op.schema().returns().size()), [&](const at::Tensor& t) {
    if (at::isFloatingType(t.scalar_type())) torch::autograd::set_history(t, error);
  });
}

inline const bool kErrorAttached = (not_differentiable = &attach_error, true);

}  // namespace detail

/// A differentiable operator.
template <class Op>
void register_outer(torch::Library& m) {
  using Grads = decltype(Op::backward(std::declval<typename Op::Saved>(), std::declval<Results<Op>>(), Needs()));
  static_assert(std::same_as<Grads, Tensors<detail::TypedNode<Op>::kInputs>>,
                "backward must return one gradient per Tensor, Tensor? or GradientList argument: op::Tensors<N>");
  detail::define<Op>(m);
  detail::implement_refusals<Op>(m);
  // An implicit composite is decomposed by whoever traces; an explicit one stays a node of the graph.
  if constexpr (requires { requires Op::kComposite; }) {
    detail::implement<Op, &boxed<Op, &detail::infer<Op>>>(m, c10::DispatchKey::CompositeImplicitAutograd);
    // Under the alias Autograd it would come after the composite.
    using enum c10::DispatchKey;
    for (const auto key : {AutogradCPU, AutogradCUDA, AutogradMeta, AutogradPrivateUse1, AutogradOther})
      detail::implement<Op, &detail::autograd_of_outer<Op>>(m, key);
  } else {
    detail::implement<Op, &boxed<Op, &detail::infer<Op>>>(m, c10::DispatchKey::CompositeExplicitAutograd);
    detail::implement<Op, &detail::autograd_of_outer<Op>>(m, c10::DispatchKey::Autograd);
  }
}

}  // namespace quire_torch::op
