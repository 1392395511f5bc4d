// What one direction of a quantized tensor encodes: the values in the order of its codes (numerics.md 0.10, 0.12).
#pragma once

#include <cstdint>

#include "quire/base/matrix.h"
#include "quire/format/element.h"
#include "quire/spec/hadamard.h"
#include "quire/spec/scale_index.h"

namespace quire {

/// Values that are read together. Every block and every group of the Hadamard transform begins at a multiple of it.
inline constexpr int64_t kValueGroup = 16;
static_assert(kHadamardSize == kValueGroup);

/// `outer` lines of `contraction` values each, Hadamard-transformed if the spec says so.
struct ValueLines {
  QuantSpec spec;
  Matrix x;
  Direction direction;
  int64_t outer, existing, contraction;  ///< existing: along the contraction, without the padding of the transform
  int64_t block, blocks;                 ///< block_length() and block_count()

  constexpr ValueLines(const QuantSpec& of, const Matrix& from, Direction along)
      : spec(of),
        x(from),
        direction(along),
        outer(along == Direction::columnwise ? from.cols : from.rows),
        existing(along == Direction::columnwise ? from.rows : from.cols),
        contraction(along == Direction::columnwise ? columnwise_tokens(of, existing) : existing),
        block(block_length(of, contraction)),
        blocks(block_count(of, contraction)) {}

  /// Values [position, position + 16) of a line; position is a multiple of 16. What does not exist counts as +0.
  QUIRE_HOST_DEVICE void read(float (&v)[kValueGroup], int64_t line, int64_t position) const {
    QUIRE_UNROLL
    for (int64_t i = 0; i < kValueGroup; ++i) v[i] = at(line, position + i);
    if (direction != Direction::columnwise || spec.hadamard == Hadamard::off) return;
    hadamard16(v, spec.hadamard == Hadamard::signs);
    QUIRE_UNROLL
    for (float& value : v) value = bf16_to_f32(f32_to_bf16(value));
  }

 private:
  QUIRE_HOST_DEVICE float at(int64_t line, int64_t position) const {
    if (line >= outer || position >= existing) return 0.0f;
    const bool columnwise = direction == Direction::columnwise;
    return load_element(x.data, x.dtype, columnwise ? position * x.row_stride + line : line * x.row_stride + position);
  }
};

}  // namespace quire
