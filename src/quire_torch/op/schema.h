// The schema of an operator, derived from its struct.
#pragma once

#include <string>

#include "quire_torch/op/fields.h"

namespace quire_torch::op {

/// "(Tensor data, Tensor scale)" of Op::kResults, "str" of Op::Value = std::string.
template <class Op>
std::string results_text() {
  if constexpr (requires { typename Op::Value; }) {
    return std::string(word<typename Op::Value>());
  } else {
    std::string s;
    for (const char* name : Op::kResults) s += (s.empty() ? "Tensor " : ", Tensor ") + std::string(name);
    return "(" + s + ")";
  }
}

/// "quire::quantize(Tensor x, str spec, bool rowwise=True) -> (Tensor data, Tensor scale)". Written tensors get alias
/// marks a, b, ... in order.
template <class Op>
std::string schema() {
  std::string s;
  char alias = 'a';
  for_each_field<typename Op::Args>([&](auto field) {
    using T = typename decltype(field)::Type;
    std::string type(word<T>());
    if (Written<T>) type.insert(std::string_view("Tensor").size(), {'(', alias++, '!', ')'});
    s += (s.empty() ? "" : ", ") + type + " " + field.name;
    if (field.fallback) s += std::string("=") + field.fallback;
  });
  return std::string(Op::kNamespace) + "::" + Op::kName + "(" + s + ") -> " + results_text<Op>();
}

}  // namespace quire_torch::op
