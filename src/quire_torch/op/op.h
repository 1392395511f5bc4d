// An operator is one declaration: a struct from which these headers derive schema, kernels and tracing. All have
//   kNamespace, kName   the operator's name, or "name.overload"
//   Context             where a call computes: made of the device of its tensors for the time of the call
//   Args                its arguments: members, and `static constexpr auto kFields` (fields.h)
// and are registered in a TORCH_LIBRARY block by one of
//   register_inner      computes results: kResults, results<Int>(args), run(args, results, context), kNotDifferentiable
//   register_mutation   writes arguments: kResults = kNoResults, run(args, context)
//   register_value      has no tensors:   Value, run(args)
//   register_outer      is differentiable, by calling inner operators (autograd.h)
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <string>
#include <string_view>

#include "quire/base/float_mode.h"
#include "quire/base/lazy.h"
#include "quire_torch/op/fields.h"
#include "quire_torch/op/once_differentiable.h"
#include "quire_torch/op/outputs.h"
#include "quire_torch/op/schema.h"

namespace quire_torch::op {

/// Which tensor arguments (Tensor, Tensor? and GradientList, counted in order) need a gradient: bit i stands for
/// argument i.
struct Needs {
  int64_t bits = 0;
  bool operator[](size_t argument) const { return bits >> argument & 1; }
  void set(size_t argument) { bits |= int64_t{1} << argument; }
};

/// Runs an inner operator whose arguments want a gradient such that differentiating its results throws. autograd.h sets
/// this pointer: one translation unit of a library includes it, the others compile in half the time.
using NotDifferentiable = void (*)(const c10::OperatorHandle&, c10::DispatchKeySet, Stack*, const char* reason);
inline NotDifferentiable not_differentiable = nullptr;

namespace detail {

inline bool is_dense(const at::Tensor& t) { return t.layout() == at::kStrided && !t.is_nested() && !t.is_quantized(); }

/// Throws, naming the argument, unless all tensors on the stack are dense: kernels read memory by strides.
inline void check_dense(const c10::OperatorHandle& op, const Stack& stack) {
  const auto& arguments = op.schema().arguments();
  const auto values = torch::jit::last(stack, arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i)
    for_each_tensor_in(values.slice(i, 1), [&](const at::Tensor& t) {
      if (is_dense(t)) return;
      const char* kind = t.is_nested() ? "nested" : t.is_quantized() ? "quantized by PyTorch" : "of layout ";
      const char* remedy = t.is_nested() ? ".to_padded_tensor(0)" : t.is_quantized() ? ".dequantize()" : ".to_dense()";
      TORCH_CHECK(false, op.schema().name(), ": ", arguments[i].name(), " must be a dense tensor, got one ", kind,
                  t.is_nested() || t.is_quantized() ? "" : c10::str(t.layout()), "; use ", remedy);
    });
}

/// Whether autograd has to know of the call whose arguments are on the stack. A forward-mode tangent throws: the
/// kernels here would drop it, and the result would have a tangent of zero without a word. So does a tensor that is not
/// dense.
inline bool wants_gradient(const c10::OperatorHandle& op, const Stack& stack) {
  bool wanted = false;
  for_each_tensor_in(torch::jit::last(stack, op.schema().arguments().size()), [&](const at::Tensor& t) {
    if (!is_dense(t)) check_dense(op, stack);
    TORCH_CHECK(!t._fw_grad(/*level=*/0).defined(), c10::toString(op.operator_name()),
                " has no forward-mode derivative; use reverse mode (backward, torch.autograd.grad, torch.func.vjp)");
    wanted |= c10::GradMode::is_enabled() && t.requires_grad();
  });
  return wanted;
}

/// check_memory() of a tensor that is not contiguous, or whose storage is too small. A view with known sizes can be of
/// a tensor with symbolic ones, which has no memory.
[[gnu::noinline]] inline void check_reach(const at::Tensor& t, const ArgumentName& where) {
  const std::optional<int64_t> known = t.storage().sym_nbytes().maybe_as_int();
  if (!known) return;
  const int64_t held = *known;
  const auto end = static_cast<int64_t>(at::detail::computeStorageNbytes(
      t.sizes(), t.strides(), static_cast<size_t>(t.element_size()), static_cast<size_t>(t.storage_offset())));
  if (end <= held) return;
  // A wrapper has no memory, and whoever unwraps it asks again.
  if (t.key_set().has_any(c10::python_ks | c10::DispatchKeySet(c10::DispatchKey::Functionalize))) return;
  TORCH_CHECK(false, where.op, ": ", where.name, " of size ", t.sizes(), " needs ", end,
              " bytes, and its storage holds ", held, "; it was freed or made smaller, as FSDP does with parameters ",
              "that are not gathered. Pass a tensor whose storage is complete");
}

/// check_memory() of a tensor that is elsewhere than the first. What is on the meta device has errors of its own.
[[gnu::noinline]] inline void check_place(const at::Tensor& t, at::Device first, const ArgumentName& where) {
  TORCH_CHECK(t.is_meta() || first.is_meta(), where.op, ": tensors must be on one device; got ", first, " and, as ",
              where.name, ", ", t.device(), "; move one with .to()");
}

/// Throws unless the storage of a tensor reaches as far as its elements do, on the device of the first tensor that has
/// elements, which it becomes if there is none. Inlined: every tensor of every call is asked.
[[gnu::always_inline]] inline void check_memory(const at::Tensor& t, std::optional<at::Device>& first,
                                                const ArgumentName& where) {
  const c10::TensorImpl& impl = *t.unsafeGetTensorImpl();
  if (!t.defined() || !impl.has_storage() || impl.has_symbolic_sizes_strides() || impl.numel() == 0) return;
  const int64_t end = (impl.storage_offset() + impl.numel()) * static_cast<int64_t>(impl.itemsize());
  if (!impl.is_contiguous() || end > impl.unsafe_storage().sym_nbytes().maybe_as_int().value_or(end)) [[unlikely]]
    check_reach(t, where);
  if (!first) first = impl.device();
  if (*first != impl.device()) [[unlikely]]
    check_place(t, *first, where);
}

/// Whether an argument of an operator is the host's, whichever device computes: Op::kOnHost ends the names of these.
template <class Op>
constexpr bool is_of_host(std::string_view argument) {
  if constexpr (requires { Op::kOnHost; }) return argument.ends_with(Op::kOnHost);
  return false;
}

/// The same of all tensors before anything is read or written: kernels would follow a null pointer or one of other
/// memory, or refuse the second of two tensors when they have written the first.
template <class Op>
[[gnu::always_inline]] inline void check_memory(const typename Op::Args& args) {
  std::optional<at::Device> of_call, of_host;
  for_each_field<typename Op::Args>([&](auto field) {
    for_each_tensor_of(args.*(field.kMember), [&](const at::Tensor& t) {
      check_memory(t, is_of_host<Op>(field.name) ? of_host : of_call, {Op::kName, field.name});
    });
  });
}

/// Whether the call asks for kernels=batch_invariant, by its recipe or by an argument.
template <class Args>
constexpr bool batch_invariant(const Args& args) {
  if constexpr (requires { args.recipe->batch_invariant; }) return args.recipe->batch_invariant;
  if constexpr (requires { args.batch_invariant; }) return args.batch_invariant;
  return false;
}

/// The device of the first tensor among the arguments, lists included; the host if there is none.
template <class Args>
at::Device device_of(const Args& args) {
  std::optional<at::Device> device;
  for_each_tensor(args, [&](const at::Tensor& t) {
    if (!device && t.defined()) device = t.device();
  });
  return device.value_or(kHost);
}

/// all: also results that this call does not produce; else those are undefined, for callers that do not look at them.
template <class Op, class Int, bool all = true>
Results<Op> allocate_results(const typename Op::Args& args) {
  Results<Op> out;
  if constexpr (out.size() > 0) {
    const std::array<Result<Int>, out.size()> results = Op::template results<Int>(args);
    const at::Device device = device_of(args);
    for (size_t i = 0; i < out.size(); ++i) {
      if (!quire::is_possible(results[i].sizes, static_cast<int64_t>(c10::elementSize(results[i].dtype)))) [[unlikely]]
        TORCH_CHECK(false, Op::kName, ": ", Op::kResults[i], " cannot be of size ", results[i].sizes, " in ",
                    results[i].dtype, ": sizes must not be negative, and those that are not 0 make ", quire::kMostBytes,
                    " bytes at most; use smaller sizes");
      if (!all && i > 0 && results[i].sizes.size() == 1 && results[i].sizes[0] == 0) continue;
      try {
        out[i] = allocate(results[i].sizes, at::device(device).dtype(results[i].dtype));
      } catch (const c10::Error& e) {
        TORCH_CHECK(false, Op::kName, ": no memory for ", Op::kResults[i], " of size ", results[i].sizes,
                    "; use smaller tensors (", e.what_without_backtrace(), ")");
      }
    }
  }
  return out;
}

/// The kernel of every device. It may use at:: functions: those neither record a graph nor bump the version of state
/// they write. It converts and compares numbers between its parallel regions too.
template <class Op, bool all = true>
Results<Op> run_kernel(const typename Op::Args& args) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const quire::FloatMode mode;
  const typename Op::Context context(device_of(args), batch_invariant(args));
  check_memory<Op>(args);
  Results<Op> out = allocate_results<Op, int64_t, all>(args);
  if constexpr (out.size() > 0) {
    Op::run(args, out, context);
  } else {
    Op::run(args, context);
  }
  return out;
}

/// The kernel of the Meta key, to which the dispatcher also takes a call whose tensors are on the meta device in part:
/// its results, or what it is to write, would then be memory that nobody has written.
template <class Op>
Results<Op> trace(const typename Op::Args& args) {
  Results<Op> out = allocate_results<Op, c10::SymInt>(args);
  for_each_tensor(args, [&](const at::Tensor& t) {
    TORCH_CHECK(!t.defined() || t.device().is_meta(), Op::kName, ": tensors must be on one device; got meta and ",
                t.device(), kInsteadOfMeta);
  });
  return out;
}

template <class Op>
concept HasKernel = requires { &Op::run; } && requires { typename Op::Context; };

/// The keys of the devices that Op has a kernel for (implement_kernel).
template <class Op>
inline std::atomic<uint64_t> kernel_keys{0};
template <class Op>
c10::DispatchKeySet devices_of() {
  return c10::DispatchKeySet::from_raw_repr(kernel_keys<Op>.load(std::memory_order_relaxed));
}
/// Those of an operator that only calls others.
inline constexpr auto kAnyDevice =
    c10::DispatchKeySet(c10::DispatchKeySet::RAW, c10::full_backend_mask).add(c10::DispatchKey::Dense);

/// Keys whose kernels for our operators fall through, or do so where nothing wants a gradient.
inline constexpr c10::DispatchKeySet kPassing = c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                                                c10::autocast_dispatch_keyset |
                                                c10::DispatchKeySet(c10::DispatchKey::BackendSelect);

/// The keys at which the dispatcher would stop for tensors of these keys.
inline c10::DispatchKeySet stops(c10::DispatchKeySet of_tensors, const c10::impl::LocalDispatchKeySet& local) {
  return (of_tensors | local.included_) - local.excluded_ - kPassing;
}

/// Whether somebody besides a device's kernel sees the call: a tracer, a mode, a transform or a subclass. A profiler
/// only watches, and does not count.
template <class Args>
bool is_traced(const Args& args) {
  c10::DispatchKeySet keys;
  for_each_tensor(args, [&](const at::Tensor& t) { keys = keys | t.key_set(); });
  return stops(keys, c10::impl::tls_local_dispatch_key_set()).highestFunctionalityKey() != c10::DispatchKey::Dense;
}

/// Who has to see a call before its kernel runs.
enum class Before {
  nobody,      ///< the dispatcher would call the kernel and do nothing else
  autograd,    ///< only the operator's own autograd kernel, since a tensor needs a gradient
  dispatcher,  ///< a tracer, a mode, a transform, a subclass, a profiler, or what an error is due to
};

/// That of a call with these arguments, of an operator with kernels for `devices`. Boxing, the search for kernels and
/// unboxing cost more than a small kernel itself.
template <class Args>
Before before_kernel(const Args& args, c10::DispatchKeySet devices) {
  const c10::impl::LocalDispatchKeySet local = c10::impl::tls_local_dispatch_key_set();
  const bool autograd = !local.excluded_.has(c10::DispatchKey::AutogradFunctionality);
  c10::DispatchKeySet keys;
  bool gradient = false, tangent = false;
  for_each_tensor(args, [&](const at::Tensor& t) {
    keys = keys | t.key_set();
    if (!autograd || !t.defined()) return;
    gradient |= c10::GradMode::is_enabled() && t.requires_grad();
    tangent |= t._fw_grad(/*level=*/0).defined();
  });
  keys = stops(keys, local);
  const bool dense = keys.has_any(c10::DispatchKeySet(c10::DispatchKey::Dense)) && devices.has_all(keys);
  if (!dense || tangent || at::hasCallbacks()) return Before::dispatcher;
  return gradient ? Before::autograd : Before::nobody;
}

template <class Op>
void autograd_of_inner(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  if (!wants_gradient(op, *stack)) return op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
  TORCH_CHECK(not_differentiable, "no translation unit of this library includes quire_torch/op/autograd.h");
  not_differentiable(op, keys, stack, Op::kNotDifferentiable);
}

template <class Op>
void run_value(const c10::OperatorHandle&, c10::DispatchKeySet, Stack* stack) {
  const quire::FloatMode mode;
  stack->push_back(box_field<typename Op::Value>(Op::run(unbox<Op>(*stack))));
}

template <class Op>
void define(torch::Library& m) {
  // const: Library::def would take a mutable vector for a kernel.
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag, at::Tag::needs_exact_strides};
  m.def(schema<Op>().c_str(), tags);
}

template <class Op, auto Kernel>
void implement(torch::Library& m, c10::DispatchKey key) {
  m.impl(Op::kName, torch::dispatch(key, torch::CppFunction::makeFromBoxedFunction<Kernel>()));
}

/// The kernel for tensors that are not dense, where autograd does not come before it.
inline void refuse(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) { check_dense(op, *stack); }

template <class Op>
void implement_refusals(torch::Library& m) {
  using enum c10::DispatchKey;
  for (const auto key : {SparseCPU, SparseCsrCPU, MkldnnCPU, NestedTensorCPU, QuantizedCPU, SparseMeta, SparseCsrMeta,
                         NestedTensorMeta, QuantizedMeta})
    implement<Op, &refuse>(m, key);
}

template <class Op>
void implement_kernel(torch::Library& m, c10::DispatchKey key) {
  implement<Op, &boxed<Op, &run_kernel<Op, true>>>(m, key);
  kernel_keys<Op>.fetch_or(c10::DispatchKeySet(key).raw_repr(), std::memory_order_relaxed);
}

template <class Op>
void define_with_kernels(torch::Library& m) {
  define<Op>(m);
  implement_refusals<Op>(m);
  implement_kernel<Op>(m, c10::DispatchKey::CPU);
  implement<Op, &boxed<Op, &trace<Op>>>(m, c10::DispatchKey::Meta);
}

/// The operator as the dispatcher knows it: kName is "name" or "name.overload".
template <class Op>
c10::OperatorHandle find() {
  const std::string name = std::string(Op::kNamespace) + "::" + Op::kName;
  const size_t dot = std::min(name.find('.'), name.size());
  const std::string overload = name.substr(std::min(dot + 1, name.size()));
  return c10::Dispatcher::singleton().findSchemaOrThrow(name.substr(0, dot).c_str(), overload.c_str());
}

}  // namespace detail

/// Calls the operator as through the dispatcher, so that tracing, autograd and tensor subclasses see it. Without `all`,
/// results after the first that the operator does not produce may be undefined instead of empty.
template <class Op, bool all = true>
Results<Op> call(const typename Op::Args& args) {
  if constexpr (detail::HasKernel<Op>)
    if (detail::before_kernel(args, detail::devices_of<Op>()) == detail::Before::nobody)
      return detail::run_kernel<Op, all>(args);
  static constinit quire::Lazy<const c10::OperatorHandle> found;
  Stack stack;
  stack.reserve(member_count<typename Op::Args>());
  for_each_field<typename Op::Args>([&](auto field) { stack.push_back(box_field(args.*(field.kMember))); });
  found.get(&detail::find<Op>).callBoxed(stack);
  Results<Op> out;
  for (size_t i = 0; i < out.size(); ++i) out[i] = std::move(stack[i]).toTensor();
  return out;
}

/// An operator with kernels of its own. Its results may be used under grad mode; differentiating them throws
/// "NAMESPACE::NAME kNotDifferentiable".
template <class Op>
void register_inner(torch::Library& m) {
  constexpr size_t tensors = count_fields<typename Op::Args>(
      []<class T>(std::type_identity<T>) { return SingleTensor<T> || SeveralTensors<T>; });
  static_assert(tensors > 0, "an operator without tensor arguments has no device: use register_value");
  static_assert(Op::kResults.size() > 0, "an operator without results is a mutation: use register_mutation");
  detail::define_with_kernels<Op>(m);
  detail::implement<Op, &detail::autograd_of_inner<Op>>(m, c10::DispatchKey::Autograd);
}

/// An operator that changes state and returns nothing. Versions are not bumped: backward may change state that an
/// earlier forward has seen.
template <class Op>
void register_mutation(torch::Library& m) {
  constexpr size_t written = count_fields<typename Op::Args>([]<class T>(std::type_identity<T>) { return Written<T>; });
  static_assert(written > 0, "a mutation needs a Mutable<> argument to write");
  static_assert(Op::kResults.size() == 0, "a mutation has no results: use register_inner");
  detail::define_with_kernels<Op>(m);
  m.impl(Op::kName, torch::dispatch(c10::DispatchKey::Autograd, torch::CppFunction::makeFallthrough()));
}

/// The kernels of inner operators and mutations for another device, whose core_device (register_device) is known.
template <class... Ops>
void implement_kernels(torch::Library& m, c10::DispatchKey key) {
  (detail::implement_kernel<Ops>(m, key), ...);
}

/// A function of plain values, `-> str` for Value = std::string.
template <class Op>
void register_value(torch::Library& m) {
  detail::define<Op>(m);
  detail::implement<Op, &detail::run_value<Op>>(m, c10::DispatchKey::CompositeExplicitAutograd);
}

}  // namespace quire_torch::op
