// Shapes whose integer may be symbolic: the same layout formulas serve real allocation (int64_t) and tracing.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <type_traits>
#include <vector>

namespace quire {

/// Sizes of a tensor, outermost first. Int is int64_t or a symbolic integer with + - * / (floor) and comparison.
/// Few sizes lie in the shape itself: every call asks for the layout of its operands, which must not cost an
/// allocation.
template <class Int>
class Shape {
 public:
  using value_type = Int;

  Shape() = default;
  Shape(std::initializer_list<Int> sizes) : Shape(sizes.begin(), sizes.end()) {}
  template <std::input_iterator It>
  Shape(It first, It last) {
    for (; first != last; ++first) push_back(*first);
  }

  void push_back(const Int& size) {
    if (size_ == kFew) many_.assign(few_.begin(), few_.end());
    if (size_ < kFew)
      few_[size_] = size;
    else
      many_.push_back(size);
    ++size_;
  }
  std::size_t size() const { return size_; }
  const Int* data() const { return size_ <= kFew ? few_.data() : many_.data(); }
  Int* data() { return size_ <= kFew ? few_.data() : many_.data(); }
  const Int* begin() const { return data(); }
  const Int* end() const { return data() + size_; }
  const Int& operator[](std::size_t i) const { return data()[i]; }
  Int& operator[](std::size_t i) { return data()[i]; }
  const Int& back() const { return data()[size_ - 1]; }
  Int& back() { return data()[size_ - 1]; }
  friend bool operator==(const Shape& a, const Shape& b) { return std::equal(a.begin(), a.end(), b.begin(), b.end()); }

 private:
  static constexpr std::size_t kFew = 4;
  std::array<Int, kFew> few_{};
  std::vector<Int> many_;  ///< all of them, where there are more than that
  std::size_t size_ = 0;
};

/// a times b. Of integers, the largest where the product would be larger: no memory is so large, so that whoever
/// allocates or checks refuses it. (A tensor with a size of 0 may have any other sizes.)
template <class Int>
constexpr Int times(const Int& a, const Int& b) {
  if constexpr (std::is_same_v<Int, int64_t>) {
    int64_t n = 0;
    return __builtin_mul_overflow(a, b, &n) ? std::numeric_limits<int64_t>::max() : n;
  } else {
    return a * b;
  }
}

template <class Int>
constexpr Int ceil_div(const Int& a, int64_t b) {
  if constexpr (std::is_same_v<Int, int64_t>)
    return a / b + (a % b > 0 ? 1 : 0);
  else
    return b == 1 ? a : (a + Int(b - 1)) / Int(b);
}

template <class Int>
constexpr Int round_up(const Int& a, int64_t b) {
  return times(ceil_div(a, b), Int(b));
}

template <class Int>
Int product(const Shape<Int>& sizes, std::size_t first, std::size_t last) {
  Int n(1);
  for (std::size_t i = first; i < last; ++i) n = times(n, sizes[i]);
  return n;
}

}  // namespace quire
