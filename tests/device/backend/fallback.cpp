// PyTorch's operators without a kernel of the device: the CPU's, on the stream.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/full.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "backend/backend.h"

namespace testdevice {
namespace {

using Stack = torch::jit::Stack;

/// Replaces each tensor by f(number of its argument, tensor), lists included.
template <class F>
void replace(Stack& stack, const F& f) {
  for (size_t i = 0; i < stack.size(); ++i) {
    c10::IValue& v = stack[i];
    const auto defined = [&](const at::Tensor& t) { return t.defined() ? f(i, t) : t; };
    if (v.isTensor()) {
      v = defined(v.toTensor());
    } else if (v.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const at::Tensor& t : v.toTensorVector()) list.push_back(defined(t));
      v = c10::IValue(list);
    } else if (v.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& t : v.toOptionalTensorList())
        list.push_back(t ? std::optional(defined(*t)) : t);
      v = c10::IValue(list);
    }
  }
}

/// A tensor of the CPU of the same form, which holds one number; none if it is large.
std::optional<at::Tensor> filled(const at::Tensor& t, double value) {
  constexpr int64_t kMost = 16384;
  int64_t elements = t.numel() > 0 ? 1 : 0;
  for (int64_t d = 0; d < t.dim() && elements > 0; ++d) elements += (t.size(d) - 1) * t.stride(d);
  if (elements > kMost) return std::nullopt;
  const at::Tensor memory = at::full({elements}, value, t.options().device(at::kCPU).requires_grad(false));
  return memory.as_strided(t.sizes(), t.strides());
}

class Call {
 public:
  Call(const c10::OperatorHandle& op, const Stack& stack) : op_(op) {
    const auto n = static_cast<ptrdiff_t>(schema().arguments().size());
    arguments_.assign(stack.end() - n, stack.end());
    replace(arguments_, [&](size_t, const at::Tensor& t) {
      if (is_ours(t) && !device_) device_ = t.device();
      return t;
    });
  }

  std::string name() const { return c10::toString(op_.operator_name()); }

  /// False if the sizes of results depend on values, or if results are lists or views.
  bool infer_results() {
    if (!device_) return false;
    for (const auto& r : schema().returns())
      if (r.type()->kind() != c10::TypeKind::TensorType || (r.alias_info() && !r.alias_info()->isWrite())) return false;
    meta_ = arguments_;
    replace(meta_, [](size_t, const at::Tensor& t) {
      return at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta));
    });
    place_devices(meta_, at::kMeta);
    const Stack given = meta_;
    try {
      const at::AutoDispatchBelowADInplaceOrView below;
      op_.callBoxed(meta_);
    } catch (const std::exception&) {  // no Meta kernel: good enough for an operator that only writes its arguments
      for (const auto& r : schema().returns())
        if (!r.alias_info()) return false;
      return true;
    }
    for (size_t i = 0; i < arguments_.size(); ++i)  // out= of another size
      if (writes(i) && arguments_[i].isTensor()) arguments_[i].toTensor().resize_(given[i].toTensor().sizes());
    return true;
  }

  /// What PyTorch refuses, it refuses when it is called, on every device. Kernels of the CPU look at their arguments
  /// themselves, so one runs here first, on small tensors of other values. An operator that takes neither zeros nor
  /// ones takes no arguments of these sizes and dtypes. Results of out= get the sizes that it gives them.
  void rehearse() const {
    for (const double value : {0.0, 1.0}) {
      bool small = true;
      Stack stack = arguments_;
      replace(stack, [&](size_t, const at::Tensor& t) {
        const std::optional<at::Tensor> other = small ? filled(t, value) : std::nullopt;
        small = other.has_value();
        return other.value_or(t);
      });
      if (!small) return;
      place_devices(stack, at::kCPU);
      place_generators(stack, [](const std::optional<at::Generator>&) { return uint64_t{0}; });
      try {
        const at::AutoDispatchBelowADInplaceOrView below;
        Stack called = stack;
        op_.callBoxed(called);
        for (size_t i = 0; i < stack.size(); ++i)
          if (writes(i) && stack[i].isTensor() && stack[i].toTensor().numel() > 0)  // none: it depends on values
            arguments_[i].toTensor().resize_(stack[i].toTensor().sizes());
        return;
      } catch (const c10::LinAlgError&) {  // it is of the values
        return;
      } catch (const std::exception&) {
        if (value == 1.0) throw;
      }
    }
  }

  Stack run() {
    const c10::DeviceGuard guard(*device_);
    Launch launch(name(), current_stream());
    Stack stack = arguments_;
    replace(stack, [&](size_t i, const at::Tensor& t) {
      return is_ours(t) ? shadow(launch, t, writes(i) ? Use::writes : Use::reads) : t.clone();
    });
    place_devices(stack, at::kCPU);
    place_generators(stack, [&](const std::optional<at::Generator>& given) { return next_seed(given, *device_); });
    Stack results;
    std::vector<at::Tensor> fresh;
    for (size_t i = 0; i < schema().returns().size(); ++i) {
      results.push_back(result(i));
      const bool is_fresh = !schema().returns()[i].alias_info() && results.back().toTensor().defined();
      fresh.push_back(is_fresh ? shadow(launch, results.back().toTensor(), Use::writes) : at::Tensor());
    }
    std::move(launch).run([op = op_, stack, fresh] {
      const at::AutoDispatchBelowADInplaceOrView below;
      Stack s = stack;
      op.callBoxed(s);
      for (size_t i = 0; i < fresh.size(); ++i)
        if (fresh[i].defined()) at::Tensor(fresh[i]).copy_(s[i].toTensor());
    });
    return results;
  }

 private:
  const c10::FunctionSchema& schema() const { return op_.schema(); }
  bool writes(size_t argument) const {
    const auto* alias = schema().arguments()[argument].alias_info();
    return alias && alias->isWrite();
  }
  static void place_devices(Stack& stack, at::Device device) {
    for (c10::IValue& v : stack)
      if (v.isDevice()) v = device;
  }
  template <class F>
  void place_generators(Stack& stack, const F& seed) const {
    for (size_t i = 0; i < stack.size(); ++i)
      if (schema().arguments()[i].name() == "generator")
        stack[i] = at::make_generator<at::CPUGeneratorImpl>(seed(stack[i].toOptional<at::Generator>()));
  }
  /// The argument that it aliases, or new memory.
  at::Tensor result(size_t i) const {
    const auto* alias = schema().returns()[i].alias_info();
    if (!alias) {
      const at::Tensor& m = meta_[i].toTensor();
      return m.defined() ? at::empty_strided(m.sizes(), m.strides(), m.options().device(*device_)) : m;
    }
    size_t a = 0;
    while (!schema().arguments()[a].alias_info() || *schema().arguments()[a].alias_info() != *alias) ++a;
    return arguments_[a].toTensor();
  }

  const c10::OperatorHandle& op_;
  Stack arguments_, meta_;
  std::optional<at::Device> device_;
};

/// Sizes of results come from the Meta kernel; where it has none, PyTorch's own fallback waits and copies.
void fallback(const c10::OperatorHandle& op, Stack* stack) {
  Call call(op, *stack);
  if (!call.infer_results()) {
    refuse_in_capture("the fallback of " + call.name());
    count("synchronous " + call.name());
    return at::native::cpu_fallback(op, stack);
  }
  call.rehearse();
  Stack results = call.run();
  torch::jit::drop(*stack, op.schema().arguments().size());
  for (c10::IValue& r : results) stack->push_back(std::move(r));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

}  // namespace
}  // namespace testdevice
