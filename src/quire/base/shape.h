// Shapes whose integer may be symbolic: the same layout formulas serve real allocation (int64_t) and tracing.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <optional>
#include <type_traits>
#include <vector>

#include "quire/base/host_device.h"

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

/// The most bytes of a tensor, with sizes of 0 counted as 1: more than processors address. Sizes within it can be
/// rounded up to blocks, and be counted in bytes, in int64.
inline constexpr int64_t kMostBytes = int64_t{1} << 56;

namespace detail {

/// The value of a size; of a symbolic one, if it is known.
template <class Int>
constexpr std::optional<int64_t> value_of(const Int& size) {
  if constexpr (std::is_same_v<Int, int64_t>)
    return size;
  else
    return size.maybe_as_int();
}

/// f(a, b), or the largest integer where it would be larger. f says whether it is, and writes the result.
template <class Int, class F>
constexpr std::optional<Int> limited(const Int& a, const Int& b, F&& f) {
  const std::optional<int64_t> known_a = value_of(a), known_b = value_of(b);
  if (!known_a || !known_b) return std::nullopt;
  int64_t n = 0;
  return Int(f(*known_a, *known_b, &n) ? std::numeric_limits<int64_t>::max() : n);
}

}  // namespace detail

/// a * b and a + b of sizes, which are not negative: the only arithmetic of shapes that can leave int64. What is known
/// is then the largest integer, not a small one: no memory is so large, so that whoever allocates or checks refuses it.
/// (A tensor with a size of 0 may have any other sizes.) Not constexpr: device code has no such builtin, and nvcc says
/// so of functions of the host alone.
template <class Int>
Int times(const Int& a, const Int& b) {
  const auto n =
      detail::limited(a, b, [](int64_t x, int64_t y, int64_t* to) { return __builtin_mul_overflow(x, y, to); });
  return n ? *n : a * b;
}
template <class Int>
Int plus(const Int& a, const Int& b) {
  const auto n =
      detail::limited(a, b, [](int64_t x, int64_t y, int64_t* to) { return __builtin_add_overflow(x, y, to); });
  return n ? *n : a + b;
}

template <class Int>
constexpr Int ceil_div(const Int& a, int64_t b) {
  if (const auto n = detail::value_of(a)) return Int(*n / b + (*n % b > 0 ? 1 : 0));
  return b == 1 ? a : (a + Int(b - 1)) / Int(b);
}

/// The next multiple of b > 0, for index maps: `a` is a size or a place in memory that exists.
constexpr int64_t padded(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

/// The same of sizes that memory is asked for; of those near the largest integer that integer, as for times(). A device
/// is given sizes that exist.
template <class Int>
constexpr Int round_up(const Int& a, int64_t b) {
  if constexpr (kDeviceCode) {
    return padded(a, b);
  } else {
    const Int count = ceil_div(a, b);
    const auto n = detail::limited(count, Int(b),
                                   [](int64_t x, int64_t y, int64_t* to) { return __builtin_mul_overflow(x, y, to); });
    return n ? *n : count * Int(b);
  }
}

template <class Int>
Int product(const Shape<Int>& sizes, std::size_t first, std::size_t last) {
  Int n(1);
  for (std::size_t i = first; i < last; ++i) n = times(n, sizes[i]);
  return n;
}

/// Whether a tensor of elements of `width` bytes may have these sizes: none is negative, and it has at most kMostBytes.
/// Symbolic sizes count if their values are known.
template <class Sizes>
bool is_possible(const Sizes& sizes, int64_t width) {
  int64_t bytes = width;
  for (const auto& size : sizes) {
    const int64_t n = detail::value_of(size).value_or(1);
    if (n < 0) return false;
    bytes = times(bytes, std::max<int64_t>(n, 1));
  }
  return bytes <= kMostBytes;
}

}  // namespace quire
