// What a quantized tensor stores: names, dtypes and shapes as a function of spec and shape. Real kernels allocate from
// it, tracing allocates from it, Python's TensorProto is it; there is no second description.
#pragma once

#include <array>
#include <string_view>

#include "quire/base/dtype.h"
#include "quire/base/shape.h"
#include "quire/spec/interleave.h"
#include "quire/spec/quant_spec.h"
#include "quire/spec/swizzle.h"

namespace quire {

/// Which way blocks run: rowwise along the last dimension (K), columnwise along the tokens (M = all others).
enum class Direction : uint8_t { rowwise, columnwise };

inline constexpr std::array<std::string_view, 6> kBufferNames{"rowwise_data",    "rowwise_scale",    "rowwise_amax",
                                                              "columnwise_data", "columnwise_scale", "columnwise_amax"};

/// Where the three of a direction start among them.
constexpr size_t first_buffer(Direction direction) { return direction == Direction::rowwise ? 0 : 3; }

template <class Int>
struct Buffer {
  DType dtype = DType::u8;
  Shape<Int> sizes{Int(0)};  ///< [0]: absent
};

/// The buffers of one direction, in the order of kBufferNames.
template <class Int>
struct Buffers {
  Buffer<Int> data, scale, amax;
};

/// Tokens that a columnwise buffer holds for m: whole groups of 16 under the Hadamard transform (numerics.md 0.10).
template <class Int>
constexpr Int columnwise_tokens(const QuantSpec& spec, const Int& m) {
  return spec.hadamard == Hadamard::off ? m : round_up(m, 16);
}

namespace detail {

/// Lines of bytes as interleaved_offset() places them.
template <class Int>
Shape<Int> interleaved_sizes(const Int& lines, const Int& bytes) {
  return {round_up(lines, kInterleavedLines), round_up(bytes, kInterleavedBytes)};
}

/// Scales of outer x contraction (numerics.md 3.3, 4.3, 5.5).
template <class Int>
Shape<Int> scale_sizes(const QuantSpec& spec, Direction direction, const Int& outer, const Int& contraction) {
  const FamilyRow& row = spec.row();
  if (row.scope == Scope::tensor) return {Int(1)};
  if (row.scope == Scope::row) return {outer};
  const Int blocks = ceil_div(contraction, row.block);
  if (row.scale == ScaleKind::f32)
    return spec.square ? Shape<Int>{ceil_div(outer, row.block), blocks} : Shape<Int>{blocks, outer};
  if (spec.interleaved) return interleaved_sizes(outer, blocks);
  const Int o = spec.swizzled ? round_up(outer, kSwizzleRows) : outer;
  const Int b = spec.swizzled ? round_up(blocks, kSwizzleCols) : blocks;
  const bool blocks_first = direction == Direction::columnwise && !row.transposed;
  return blocks_first ? Shape<Int>{b, o} : Shape<Int>{o, b};
}

}  // namespace detail

/// Amaxes above the blocks that one direction's scales follow from: one of the tensor, one for each of `outer` lines,
/// or none.
template <class Int>
constexpr Int amax_count(const QuantSpec& spec, const Int& outer) {
  const FamilyRow& row = spec.row();
  if (spec.row_scaled || row.scope == Scope::row) return outer;
  return Int(row.has_amax || row.scope == Scope::tensor ? 1 : 0);
}

/// Buffers of one direction of a tensor of `shape` (rank >= 1; M = product of all but the last size, K = the last).
template <class Int>
Buffers<Int> buffers(const QuantSpec& spec, const Shape<Int>& shape, Direction direction) {
  const FamilyRow& row = spec.row();
  const Int k = shape.back(), m = product(shape, 0, shape.size() - 1);
  const bool columnwise = direction == Direction::columnwise;
  const Int outer = columnwise ? k : m, contraction = columnwise ? columnwise_tokens(spec, m) : k;
  Shape<Int> data = shape;
  if (columnwise && row.transposed) data = {outer, contraction};
  if (spec.packed()) data.back() = ceil_div(data.back(), 2);
  if (spec.interleaved) data = detail::interleaved_sizes(outer, ceil_div(contraction, spec.packed() ? 2 : 1));
  Buffers<Int> out;
  out.data = {DType::u8, data};
  out.scale = {row.scale == ScaleKind::f32 ? DType::f32 : DType::u8,
               detail::scale_sizes(spec, direction, outer, contraction)};
  out.amax = {DType::f32, {!row.has_amax ? Int(0) : spec.row_scaled ? outer : Int(1)}};
  return out;
}

}  // namespace quire
