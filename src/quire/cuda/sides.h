// What every row of a quantization does before its kernels write codes: the rules of given values, where groups lie,
// and zeros where no thread writes.
#pragma once

#include "quire/base/context.h"
#include "quire/cuda/kernels/groups.h"
#include "quire/spec/problem.h"

namespace quire::cuda {

inline constexpr std::array kDirections{Direction::rowwise, Direction::columnwise};

inline const Side& side_of(const QuantizeProblem& p, Direction direction) {
  return direction == Direction::rowwise ? p.rowwise : p.columnwise;
}
inline bool is_present(const Side& side) { return side.data || side.scale || side.amax; }

/// A matrix that has as many rows as all of a list, for sizes alone.
Matrix all_of(const QuantizeProblem& p);

/// Amaxes above the blocks of one direction, of all groups.
int64_t amaxes_of(const QuantSpec& spec, const Matrix& x, const RowGroups& groups, Direction direction);

/// The groups of a direction that is asked for. Numbers that the caller gives are checked. What no thread writes of its
/// buffers is zero then: padding, and what is left of flat buffers. Codes of groups that are left out stay what they
/// are; nobody reads them.
Places place_side(const QuantizeProblem& p, Direction direction, const Context& context);

}  // namespace quire::cuda
