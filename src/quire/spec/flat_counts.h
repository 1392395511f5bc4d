// How many elements a group stores in flat buffers (groups.h), as formulas that a kernel evaluates: it alone knows how
// many rows a group has, and has no buffers() to ask.
#pragma once

#include "quire/spec/groups.h"

namespace quire {

/// Elements of one buffer of a tensor of `rows` rows: they grow at every `step` rows.
struct FlatCount {
  int64_t step = 1;
  int64_t grown = 0;  ///< by each step that has begun
  int64_t least = 0;  ///< without rows

  constexpr int64_t operator()(int64_t rows) const { return least + grown * ceil_div(rows, step); }
};

/// Of data, scale and amax.
using FlatCounts = std::array<FlatCount, 3>;

/// Tokens after which scales grow, exactly: token_steps() is a bound that has room for more.
inline int64_t scale_step(const QuantSpec& spec, Direction direction) {
  const bool columnwise = direction == Direction::columnwise;
  const FamilyRow& row = spec.row();
  if (row.scope != Scope::block) return 1;
  if (row.scale == ScaleKind::f32) return columnwise || spec.square ? row.block : 1;
  // Also those of square tiles have a byte in each line.
  if (columnwise) return row.block * (spec.swizzled ? kSwizzleCols : spec.interleaved ? kInterleavedBytes : 1);
  return spec.swizzled ? kSwizzleRows : spec.interleaved ? kInterleavedLines : 1;
}

/// What buffers() says of `direction` of a tensor of `cols` columns, for any number of rows.
inline FlatCounts flat_counts(const QuantSpec& spec, int64_t cols, Direction direction) {
  const std::array<int64_t, 3> steps{token_steps(spec, direction)[0], scale_step(spec, direction), 1};
  const auto of = [&](int64_t rows) { return counts(buffers<int64_t>(spec, {rows, cols}, direction)); };
  const BufferCounts<int64_t> none = of(0);
  FlatCounts found;
  for (size_t i = 0; i < found.size(); ++i) found[i] = {steps[i], of(steps[i])[i] - none[i], none[i]};
  return found;
}

}  // namespace quire
