// What is said where somebody asks for a second derivative.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <string_view>

namespace quire_torch::op {

/// Follows the name of an operator.
inline constexpr std::string_view kOnceDifferentiable =
    " is once differentiable, so a second derivative (create_graph=True) through it is not available; compute with "
    "PyTorch's operators what is differentiated twice: quire.Linear does within quire.autocast(enabled=False), outside "
    "of quire.batch_invariant";

/// The text of an inner operator that computes gradients, as kNotDifferentiable: of which operator.
template <size_t N>
consteval auto gradient_of(const char (&name)[N]) {
  constexpr std::string_view begin = "has no gradient: ";
  std::array<char, begin.size() + N + kOnceDifferentiable.size()> text{};
  char* end = std::copy(begin.begin(), begin.end(), text.data());
  end = std::copy_n(name, N - 1, end);
  std::copy(kOnceDifferentiable.begin(), kOnceDifferentiable.end(), end);
  return text;
}

}  // namespace quire_torch::op
