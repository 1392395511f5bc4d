// Groups of tokens, such as the tokens of each expert: what their quantized tensors store, and where (numerics.md
// 0.19). A quantized tensor of E groups is the buffers of E tensors [rows of the group, K], one after another: blocks,
// transforms and amaxes restart in every group.
#pragma once

#include <algorithm>
#include <array>

#include "quire/base/matrix.h"
#include "quire/spec/buffers.h"

namespace quire {

/// Groups of consecutive rows of one matrix. One group without ends is the matrix itself, which is what problems ask
/// for unless they say otherwise; nothing else is then read here. Where each group ends lies in a tensor, which kernels
/// alone read and check: ends do not decrease and are from 0 to `rows`.
struct RowGroups {
  int64_t count = 1;            ///< E
  int64_t rows = 0;             ///< of the matrix
  Integers ends{};              ///< [E]; no data: each group has rows / count
  const char* what = "groups";  ///< the operation that was given the ends, for errors

  /// `count` groups of `each` rows.
  static RowGroups equal(int64_t count, int64_t each) { return {.count = count, .rows = times(count, each)}; }
};

/// Whether no end says where the one group lies: it has all rows.
inline bool is_one(const RowGroups& g) { return g.count == 1 && g.ends.data == nullptr; }

/// Elements of data, scale and amax of one direction, all groups together.
template <class Int>
using BufferCounts = std::array<Int, 3>;

template <class Int>
BufferCounts<Int> counts(const Buffers<Int>& b) {
  const auto count = [](const Buffer<Int>& one) { return product(one.sizes, 0, one.sizes.size()); };
  return {count(b.data), count(b.scale), count(b.amax)};
}

/// Elements that the flat buffers of groups have room for, in each direction.
struct Room {
  BufferCounts<int64_t> rowwise{}, columnwise{};

  const BufferCounts<int64_t>& of(Direction d) const { return d == Direction::rowwise ? rowwise : columnwise; }
};

/// Tokens after which the size of a buffer grows: of data, and of scales.
inline std::array<int64_t, 2> token_steps(const QuantSpec& spec, Direction direction) {
  const bool columnwise = direction == Direction::columnwise;
  const int64_t block = spec.row().block == 0 ? 1 : spec.row().block;
  if (spec.interleaved) {
    const int64_t bytes = kInterleavedBytes * (spec.packed() ? 2 : 1);
    const int64_t data =
        !columnwise ? kInterleavedLines : std::max<int64_t>(bytes, spec.hadamard != Hadamard::off ? 16 : 1);
    return {data, columnwise    ? block * kInterleavedBytes
                  : spec.square ? std::max(block, kInterleavedLines)
                                : kInterleavedLines};
  }
  const int64_t data = !columnwise ? 1 : spec.hadamard != Hadamard::off ? 16 : spec.packed() ? 2 : 1;
  if (!spec.swizzled) return {data, columnwise || spec.square ? block : 1};
  return {data, columnwise ? block * kSwizzleCols : kSwizzleRows};
}

/// What is known of groups without looking at them.
template <class Int>
struct GroupSizes {
  Int tokens;  ///< of all of them
  Int k;
  int64_t groups;
};

/// What groups store at most, however their tokens are divided.
template <class Int>
BufferCounts<Int> grouped_counts(const QuantSpec& spec, const GroupSizes<Int>& sizes, Direction direction) {
  const auto [data_step, scale_step] = token_steps(spec, direction);
  const auto of = [&](const Int& m) { return counts(buffers(spec, Shape<Int>{m, sizes.k}, direction)); };
  // Tokens, if each group has as many more as it needs to begin a step.
  const auto with = [&](int64_t step) { return plus(sizes.tokens, times(Int(step - 1), Int(sizes.groups))); };
  const auto none = of(Int(0)), data = of(with(data_step)), scale = of(with(scale_step)), amax = of(sizes.tokens);
  const auto bound = [&](size_t i, const BufferCounts<Int>& most) {
    return plus(most[i], times(none[i], Int(sizes.groups - 1)));
  };
  return {bound(0, data), bound(1, scale), bound(2, amax)};
}

/// Whether amaxes above the blocks are of lines rather than of the tensor.
constexpr bool has_amax_per_line(const QuantSpec& spec) { return amax_count<int64_t>(spec, 2) == 2; }

/// What is measured above the blocks of groups: a number for each line of the matrix (of its rows, or of its columns in
/// each group), or one for each group (amax_count).
template <class Int>
Int grouped_amax_count(const QuantSpec& spec, const GroupSizes<Int>& sizes, Direction direction) {
  if (!has_amax_per_line(spec)) return times(amax_count<Int>(spec, Int(1)), Int(sizes.groups));
  return direction == Direction::rowwise ? sizes.tokens : times(sizes.k, Int(sizes.groups));
}

}  // namespace quire
