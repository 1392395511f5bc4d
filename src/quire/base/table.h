// Tables of constants that device code reads too.
#pragma once

#include <cstddef>
#include <iterator>
#include <utility>

#include "quire/base/host_device.h"

namespace quire {

/// kTable[i]: on the host the entry itself, in device code a copy. Device code has no table of the host, and would copy
/// a local one to memory before it reads from it. So it compares i with the index of each entry.
template <const auto& kTable>
constexpr decltype(auto) entry(std::size_t i) {
  if constexpr (kDeviceCode) {
    return [i]<std::size_t... kIndex>(std::index_sequence<kIndex...>) {
      auto found = [] {
        constexpr auto first = kTable[0];
        return first;
      }();
      const auto take = [&](const auto& one) { found = one; };
      (
          [&] {
            constexpr auto one = kTable[kIndex];
            if (i == kIndex) take(one);
          }(),
          ...);
      return found;
    }(std::make_index_sequence<std::size(kTable)>());
  } else {
    return (kTable[i]);
  }
}

}  // namespace quire
