// Between the dispatcher's stack and the struct of an operator, in both directions.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "quire_torch/op/outputs.h"

namespace quire_torch::op {

using Stack = torch::jit::Stack;

/// f(tensor) for every defined tensor among the values, lists included.
template <class F>
void for_each_tensor_in(at::ArrayRef<at::IValue> values, F&& f) {
  for (const at::IValue& v : values) {
    if (v.isTensor()) {
      if (v.toTensor().defined()) f(v.toTensor());
    } else if (v.isList()) {
      for_each_tensor_in(v.toListRef(), f);
    }
  }
}

/// Gives one field its value from the stack.
template <class Op, class Field>
[[gnu::always_inline]] inline void unbox_into(typename Op::Args& args, Field field, at::IValue& value) {
  args.*(field.kMember) = unbox_field<typename Field::Type>(value, {Op::kName, field.name});
}

/// Takes the arguments off the stack. Throws where one is no value of its kind (unbox_field).
template <class Op, class Args = typename Op::Args>
Args unbox(Stack& stack) {
  constexpr size_t n = member_count<Args>();
  Args args{};
  at::IValue* next = stack.data() + stack.size() - n;
  for_each_field<Args>([&](auto field) { unbox_into<Op>(args, field, *next++); });
  torch::jit::drop(stack, n);
  return args;
}

/// Run(const Args&) -> Results<Op> as a kernel.
template <class Op, auto Run>
void boxed(const c10::OperatorHandle&, c10::DispatchKeySet, Stack* stack) {
  for (at::Tensor& t : Run(unbox<Op>(*stack))) stack->emplace_back(std::move(t));
}

}  // namespace quire_torch::op
