// The arguments of an operator are a struct with a list of its fields: which types a field may have, what each is
// called in a schema, how it crosses the dispatcher's stack, and the refusal of a list that is not the whole struct.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <concepts>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace quire_torch::op {

using OptionalTensor = std::optional<at::Tensor>;
using TensorList = std::vector<at::Tensor>;
using OptionalTensorList = std::vector<OptionalTensor>;

/// A list of tensors with gradients. Of several the operator returns one tensor with a leading dimension for the list.
struct GradientList {
  TensorList tensors;
};

/// A tensor argument that the operator writes.
template <class T>
struct Mutable {
  T value;
};

template <class T, class... Choices>
concept OneOf = (std::same_as<T, Choices> || ...);
template <class T>
concept Written = OneOf<T, Mutable<at::Tensor>, Mutable<OptionalTensor>, Mutable<TensorList>>;
template <class T>
concept SingleTensor = OneOf<T, at::Tensor, OptionalTensor, Mutable<at::Tensor>, Mutable<OptionalTensor>>;
template <class T>
concept SeveralTensors = OneOf<T, TensorList, OptionalTensorList, Mutable<TensorList>, GradientList>;
/// An argument that has a place in op::Needs, and a gradient.
template <class T>
concept HasGradient = (SingleTensor<T> && !Written<T>) || OneOf<T, GradientList>;

/// A value that travels as its canonical text and appears as `str` in schemas and graphs.
template <class T>
concept Textual = requires(const T& v) {
  { T::parse(std::string_view{}) } -> std::same_as<T>;
  { v.text() } -> std::convertible_to<std::string_view>;
};

/// What a schema calls a field of type T; empty for a type that cannot be one.
template <class T>
consteval std::string_view word() {
  if constexpr (Written<T>) return word<decltype(T::value)>();
  if (std::same_as<T, at::Tensor>) return "Tensor";
  if (std::same_as<T, OptionalTensor>) return "Tensor?";
  if (OneOf<T, TensorList, GradientList>) return "Tensor[]";
  if (std::same_as<T, OptionalTensorList>) return "Tensor?[]";
  if (std::same_as<T, int64_t>) return "int";
  if (std::same_as<T, c10::SymInt>) return "SymInt";
  if (std::same_as<T, std::vector<c10::SymInt>>) return "SymInt[]";
  if (std::same_as<T, double>) return "float";
  if (std::same_as<T, bool>) return "bool";
  if (std::same_as<T, at::ScalarType>) return "ScalarType";
  if (std::same_as<T, std::string> || Textual<T>) return "str";
  return {};
}

/// Which argument a value is, for errors.
struct ArgumentName {
  const char* op;
  const char* name;
};

/// Throws where a number that is a size, or how many of something there are, is known and negative.
inline void check_size(const c10::SymInt& size, const ArgumentName& where) {
  const std::optional<int64_t> value = size.maybe_as_int();
  TORCH_CHECK(!value || *value >= 0, where.op, ": ", where.name, " must not be negative, got ", *value,
              "; pass a size of at least 0");
}

/// A dtype, which travels as a number. Throws for one that is no dtype: PyTorch would read beyond its tables of dtypes.
[[gnu::always_inline]] inline at::ScalarType unbox_dtype(const at::IValue& v, const ArgumentName& where) {
  const int64_t number = v.toInt();
  TORCH_CHECK(number >= 0 && number < static_cast<int64_t>(at::ScalarType::NumOptions) &&
                  number != static_cast<int64_t>(at::ScalarType::Undefined),
              where.op, ": ", where.name, " must be a dtype, got the number ", number,
              ", which is none; pass a dtype such as torch.bfloat16");
  return static_cast<at::ScalarType>(number);
}

template <class T>
[[gnu::always_inline]] inline T unbox_field(at::IValue& v, const ArgumentName& where) {
  static_assert(!word<T>().empty(), "an operator has no field of this type: op/fields.h lists the kinds");
  if constexpr (Written<T>) {
    return {unbox_field<decltype(T::value)>(v, where)};
  } else if constexpr (std::same_as<T, GradientList>) {
    return {unbox_field<TensorList>(v, where)};
  } else if constexpr (Textual<T>) {
    return T::parse(v.toStringView());
  } else if constexpr (std::same_as<T, at::ScalarType>) {
    return unbox_dtype(v, where);
  } else if constexpr (std::same_as<T, c10::SymInt>) {
    T size = std::move(v).to<T>();
    check_size(size, where);
    return size;
  } else if constexpr (std::same_as<T, std::vector<c10::SymInt>>) {
    T sizes = std::move(v).to<T>();
    for (const c10::SymInt& size : sizes) check_size(size, where);
    return sizes;
  } else if constexpr (SeveralTensors<T>) {
    // AOTInductor's runtime hands over an empty list of tensors as None.
    return v.isNone() ? T() : std::move(v).to<T>();
  } else {
    return std::move(v).to<T>();
  }
}

template <class T>
at::IValue box_field(const T& v) {
  if constexpr (Written<T>) {
    return v.value;
  } else if constexpr (std::same_as<T, GradientList>) {
    return v.tensors;
  } else if constexpr (Textual<T>) {
    return std::string(v.text());
  } else {
    return v;
  }
}

template <auto Member>
struct Field;
template <class S, class T, T S::* Member>
struct Field<Member> {
  using Type = T;
  static constexpr auto kMember = Member;
  const char* name;
  const char* fallback;  ///< the default value as schema text, or null
};

/// One entry of `static constexpr auto kFields = std::tuple{field<&Args::x>("x"), field<&Args::n>("n", "1")}`.
template <auto Member>
consteval Field<Member> field(const char* name, const char* fallback = nullptr) {
  return {name, fallback};
}

template <class S>
struct AnyField {
  template <class T>
    requires(!std::same_as<T, S>)
  operator T() const;
};

/// The longest list of anything that initialises S, up to 32. Counted down: a member without a default constructor
/// (c10::List) refuses every shorter list, so counting up would stop at 0.
template <class S, size_t N = 32>
consteval size_t member_count() {
  constexpr bool accepts = []<size_t... I>(std::index_sequence<I...>) {
    return requires { S{(static_cast<void>(I), AnyField<S>{})...}; };
  }(std::make_index_sequence<N>{});
  if constexpr (accepts || N == 0) {
    return N;
  } else {
    return member_count<S, N - 1>();
  }
}

template <class F, class... Fields>
consteval size_t occurrences(const std::tuple<Fields...>&) {
  return (size_t{std::same_as<F, Fields>} + ... + size_t{0});
}

/// A struct that has the fields of another one, its only base, in front of its own, and lists its own alone.
template <class S>
concept Extended = requires { typename S::Base; };

/// Calls f(field) for every field of S in the order of the list. Does not compile unless the list is complete.
template <class S, class F>
[[gnu::always_inline]] constexpr void for_each_field(F&& f) {
  if constexpr (Extended<S>) for_each_field<typename S::Base>(f);
  std::apply(
      [&]<class... Fields>(Fields... fields) __attribute__((always_inline)) {
        static_assert(sizeof...(Fields) + (Extended<S> ? 1 : 0) == member_count<S>(),
                      "kFields must list every member of its struct (up to 32)");
        static_assert(((occurrences<Fields>(S::kFields) == 1) && ...), "kFields must list every member only once");
        (f(fields), ...);
      },
      S::kFields);
}

/// The number of fields of S for whose type T the predicate, a lambda [](std::type_identity<T>), is true.
template <class S, class Predicate>
consteval size_t count_fields(Predicate predicate) {
  size_t n = 0;
  for_each_field<S>([&](auto field) { n += predicate(std::type_identity<typename decltype(field)::Type>{}) ? 1 : 0; });
  return n;
}

/// f(tensor) for what one field holds: nothing for an absent optional or a field that is no tensor.
template <class T, class F>
void for_each_tensor_of(T& value, F&& f) {
  using Value = std::remove_const_t<T>;
  if constexpr (std::same_as<Value, at::Tensor>) {
    f(value);
  } else if constexpr (std::same_as<Value, OptionalTensor>) {
    if (value) f(*value);
  } else if constexpr (Written<Value>) {
    for_each_tensor_of(value.value, f);
  } else if constexpr (std::same_as<Value, GradientList>) {
    for_each_tensor_of(value.tensors, f);
  } else if constexpr (SeveralTensors<Value>) {
    for (auto& element : value) for_each_tensor_of(element, f);
  }
}

/// f(tensor) for every tensor of S, lists included, in order; S may be const.
template <class S, class F>
void for_each_tensor(S& s, F&& f) {
  for_each_field<std::remove_const_t<S>>([&](auto field) { for_each_tensor_of(s.*(field.kMember), f); });
}

// Whole structs between the dispatcher's stack and the operator.

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
