// Shapes whose integer may be symbolic: the same layout formulas serve real allocation (int64_t) and tracing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace quire {

/// Sizes of a tensor, outermost first. Int is int64_t or a symbolic integer with + - * / (floor) and comparison.
template <class Int>
using Shape = std::vector<Int>;

template <class Int>
constexpr Int ceil_div(const Int& a, int64_t b) {
  return b == 1 ? a : (a + Int(b - 1)) / Int(b);
}

template <class Int>
constexpr Int round_up(const Int& a, int64_t b) {
  return ceil_div(a, b) * Int(b);
}

template <class Int>
Int product(const Shape<Int>& sizes, std::size_t first, std::size_t last) {
  Int n(1);
  for (std::size_t i = first; i < last; ++i) n = n * sizes[i];
  return n;
}

}  // namespace quire
