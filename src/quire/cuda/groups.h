// Problems of groups: what the host launches before the kernel that computes.
#pragma once

#include <optional>
#include <span>

#include "quire/cuda/kernels/groups.h"
#include "quire/cuda/launch.h"
#include "quire/spec/problem.h"

namespace quire::cuda {

/// One direction of quantized groups in flat buffers, for place_groups().
struct FlatGroups {
  const QuantSpec& spec;
  Direction direction;
  int64_t cols;
  const BufferCounts<int64_t>& room;
  std::string_view what;  ///< "op: argument", for errors
};

/// The places of groups of `rows` rows of a matrix, in memory of the workspace; for one tensor nothing is launched.
Places place_groups(const RowGroups& groups, int64_t rows, const Context& context);
/// The same with their places in flat buffers.
Places place_groups(const RowGroups& groups, int64_t rows, const FlatGroups& flat, const Context& context);

/// Blocks along y take groups in turns: as many as there are, up to what a launch may have.
inline Grid with_groups(Grid grid, int64_t groups) {
  constexpr int64_t most = 1 << 15;
  grid.blocks_y = static_cast<unsigned>(std::clamp<int64_t>(groups, 1, most));
  return grid;
}

/// Zeroes the rows of `m` that belong to no group; nothing for one tensor.
void zero_beyond(const MutableMatrix& m, const Places& groups, const Context& context);

/// Zeroes what no group has of a flat buffer of `room` bytes of codes; nothing for one tensor.
void zero_rest(void* data, int64_t room, const Places& groups, const Context& context);

/// The dtype of a matrix, or of all of a list; nothing where they differ.
std::optional<DType> common_dtype(const Matrix& m, std::span<const Matrix> each);

/// A list of the host in memory of the workspace; null for an empty one.
const void* list_on_device(std::span<const std::byte> list, const Context& context);
template <class T>
const T* list_on_device(std::span<const T> list, const Context& context) {
  static_assert(std::is_trivially_copyable_v<T>);
  return static_cast<const T*>(list_on_device(std::as_bytes(list), context));
}

}  // namespace quire::cuda
