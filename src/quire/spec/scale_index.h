// Where a code and a scale lie in the buffers of buffers.h: pure index maps, shared by the reference and every kernel.
// outer and l (position along the contraction) are those of the direction: rowwise outer = M, contraction = K;
// columnwise outer = K, contraction = columnwise_tokens(M).
#pragma once

#include <cstdint>

#include "quire/format/pack.h"
#include "quire/spec/buffers.h"
#include "quire/spec/interleave.h"
#include "quire/spec/quant_spec.h"
#include "quire/spec/swizzle.h"

namespace quire {

/// Elements along the contraction that share a scale; all of them where a scale covers a row or the tensor.
constexpr int64_t block_length(const QuantSpec& spec, int64_t contraction) {
  return spec.row().block == 0 ? contraction : spec.row().block;
}

/// Scales along the contraction: 1 where a scale covers a row or the tensor, else one per started block.
constexpr int64_t block_count(const QuantSpec& spec, int64_t contraction) {
  return spec.row().block == 0 ? 1 : ceil_div(contraction, spec.row().block);
}

/// True where lines run against memory: the columnwise side of a family that keeps its codes untransposed
/// (numerics.md 4.3).
constexpr bool blocks_first(const QuantSpec& spec, Direction direction) {
  return direction == Direction::columnwise && !spec.row().transposed && !spec.interleaved;
}

/// True where each scale is a byte beside the codes of its block, and so interleaved where they are.
constexpr bool has_byte_scales(const QuantSpec& spec) { return spec.row().scale != ScaleKind::f32; }

/// One direction of a quantized tensor: `outer` lines of `along` entries each, codes for data_index, scales for
/// scale_index.
struct SideGrid {
  const QuantSpec& spec;
  Direction direction;
  int64_t outer;
  int64_t along;
};

/// Element index, in the scale buffer, of the scale of block `block` of line `outer` (numerics.md 3.3, 4.3, 4.5, 5.5).
constexpr int64_t scale_index(const SideGrid& scales, int64_t outer, int64_t block) {
  const FamilyRow& row = scales.spec.row();
  if (row.scope == Scope::tensor) return 0;
  if (row.scope == Scope::row) return outer;
  if (row.scale == ScaleKind::f32)
    return scales.spec.square ? outer / row.block * scales.along + block : block * scales.outer + outer;
  if (scales.spec.interleaved) return interleaved_offset(outer, block, scales.along);
  if (scales.spec.swizzled) return swizzled_offset(outer, block, scales.along);
  return blocks_first(scales.spec, scales.direction) ? block * scales.outer + outer : outer * scales.along + block;
}

/// Index of code (outer, l) in the data buffer, in codes. A packed line starts at a byte, so byte = index / 2 and the
/// low nibble is that of the even index.
constexpr int64_t data_index(const SideGrid& codes, int64_t outer, int64_t l) {
  if (codes.spec.interleaved) {
    const int64_t in_byte = codes.spec.packed() ? 2 : 1;
    return interleaved_offset(outer, l / in_byte, ceil_div(codes.along, in_byte)) * in_byte + l % in_byte;
  }
  if (blocks_first(codes.spec, codes.direction)) return l * codes.outer + outer;
  return outer * (codes.spec.packed() ? padded(codes.along, 2) : codes.along) + l;
}

/// The code at an index of data_index.
constexpr unsigned code_at(const QuantSpec& spec, const uint8_t* data, int64_t index) {
  return spec.packed() ? unpack(data, index) : data[index];
}

/// Entry of the amax buffer that line `outer` uses: one per line where amaxes are per line, else the only one.
constexpr int64_t amax_index(const QuantSpec& spec, int64_t outer) { return spec.row_scaled ? outer : 0; }

}  // namespace quire
