// How rows move between the order of tokens and that of experts (moe-reference.md 2): rules for the kernels of every
// device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "quire/base/host_device.h"

namespace quire {

/// Experts whose number nobody said are fewer than this.
inline constexpr int64_t kMostExperts = 1 << 16;

/// Whether a number is one of `count`, or -1 for none: of ids of experts, and of rows of a map.
constexpr bool is_number_or_none(int64_t number, int64_t count) { return number >= -1 && number < count; }

/// Consecutive slots of a token.
struct Slots {
  int64_t begin, end;
};

/// sum = a piece of the sum of a token's rows, in the order of its slots. next(slot): the first that has a row, from
/// this one on. load(slot, piece) reads a piece of its row and multiplies it by its weight. `row` is room for a piece.
template <class Piece, class Next, class Load>
QUIRE_HOST_DEVICE void add_rows(const Slots& slots, Piece& sum, Piece& row, const Next& next, const Load& load) {
  load(slots.begin, sum);
  for (int64_t slot = next(slots.begin + 1); slot < slots.end; slot = next(slot + 1)) {
    load(slot, row);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += row[i];
  }
}

}  // namespace quire
