// What kernels are compiled for: the element formats that specs reach, and the kinds of scales that they come with.
// Derived from the tables, so that a format needs a row and an option, and nothing else.
#pragma once

#include <algorithm>
#include <array>
#include <type_traits>

#include "quire/spec/quant_spec.h"

namespace quire {

struct Kinds {
  Format element;
  ScaleKind scale;
};

namespace detail {

/// Whether the text of a spec can ask for them.
constexpr bool reaches(const Kinds& kinds) {
  for (size_t i = 0; i < kFamilies.size(); ++i) {
    if (kFamilies[i].scale != kinds.scale) continue;
    if (kFamilies[i].element == kinds.element) return true;
    for (const ElementOption& option : kElementOptions)
      if (option.element == kinds.element && (option.families >> i & 1)) return true;
  }
  return false;
}

constexpr std::array kScaleKinds{ScaleKind::f32, ScaleKind::e8m0, ScaleKind::two_level};

constexpr bool is_element(Format f) {
  return std::ranges::any_of(kScaleKinds, [f](ScaleKind scale) { return reaches({f, scale}); });
}

template <class T>
struct List {
  std::array<T, kFormats.size() * kScaleKinds.size()> items{};
  size_t count = 0;

  constexpr void add(const T& item) { items[count++] = item; }
};
template <const auto& kList>
constexpr auto array_of() {
  std::array<std::remove_cvref_t<decltype(kList.items[0])>, kList.count> items{};
  std::copy_n(kList.items.begin(), kList.count, items.begin());
  return items;
}

inline constexpr List<Kinds> kReached = [] {
  List<Kinds> found;
  for (size_t i = 0; i < kFormats.size(); ++i)
    for (const ScaleKind scale : kScaleKinds)
      if (const Kinds kinds{static_cast<Format>(i), scale}; reaches(kinds)) found.add(kinds);
  return found;
}();
template <bool kPacked>
inline constexpr List<Format> kReachedElements = [] {
  List<Format> found;
  for (size_t i = 0; i < kFormats.size(); ++i)
    if (const auto f = static_cast<Format>(i); is_element(f) && (kPacked || !row(f).packed())) found.add(f);
  return found;
}();

}  // namespace detail

inline constexpr auto kKinds = detail::array_of<detail::kReached>();
inline constexpr auto kElements = detail::array_of<detail::kReachedElements<true>>();
/// Those whose codes have a byte each.
inline constexpr auto kByteElements = detail::array_of<detail::kReachedElements<false>>();

// What kernels take for granted. A format that breaks a rule needs kernels of its own first.

static_assert(std::ranges::all_of(kElements, [](Format f) { return row(f).is_signed && row(f).bits() <= 8; }),
              "elements are signed and have at most 8 bits");
static_assert(std::ranges::all_of(kElements, [](Format f) { return !row(f).packed() || f == kPackedFormat; }),
              "kernels of packed codes know the values of one format of 4 bits");
static_assert(std::ranges::all_of(kKinds,
                                  [](Kinds k) { return k.element != kPackedFormat || k.scale != ScaleKind::f32; }),
              "kernels of packed codes expect a scale of a byte for each block");
static_assert(
    std::ranges::all_of(kKinds, [](Kinds k) { return k.scale != ScaleKind::two_level || k.element == kPackedFormat; }),
    "two-level scales are defined for one element format (numerics.md 5)");

}  // namespace quire
