// What the host asks the kernels of quantize.cu for, and how many threads have work.
#pragma once

#include "quire/cuda/kernels/groups.h"
#include "quire/spec/block_codes.h"
#include "quire/spec/problem.h"

namespace quire::cuda {

/// Amaxes above the blocks of one direction, for each group.
struct AmaxJob {
  QuantSpec spec;
  Matrix x;
  Direction direction;
  Places groups;
  const Matrix* each;  ///< a matrix for each group, instead of x's memory; or null
  uint32_t* to;        ///< bits of as many as grouped_amax_count(), 0 at first: magnitudes are ordered like their bits
};

/// One direction of a quantization, for each group.
struct QuantizeJob {
  QuantSpec spec;
  Matrix x;
  Direction direction;
  Side side;
  Randomness random;
  const float* scale;   ///< QuantizeProblem::scale
  const float* amaxes;  ///< what was given or measured above the blocks, as many as grouped_amax_count()
  Places groups;
  const Matrix* each;  ///< as in AmaxJob
  RowGroups only;      ///< as in QuantizeProblem
};

/// The rules of values that a caller gives to one direction of a quantization, for each group that has rows.
struct GivenJob {
  QuantSpec spec;
  Direction direction;
  Places groups;
  int64_t cols;
  const float* scale;   ///< of each group; or null
  const float* amaxes;  ///< [count] as grouped_amax_count() says; or null
  int64_t count;
  FaultSite of_scale, of_amax;
};

struct DequantizeJob {
  DequantizeProblem problem;
  Places groups;
};

/// Codes and scales of `from` in the order of `to`, another spec of the same numbers.
struct ReorderJob {
  Operand from;
  QuantSpec to;
  uint8_t* data;
  uint8_t* scale;
  int64_t f32_scales;  ///< those of float32, which have one order
};

/// How the values of a direction are shared among threads: all values of a scale, or a piece of a line.
struct Parts {
  static constexpr int64_t kPiece = 128;
  int64_t length, along, lines, count;

  constexpr explicit Parts(const ValueLines& t)
      : length(t.spec.row().scope == Scope::block ? t.block : kPiece),
        along(ceil_div(t.contraction, length)),
        lines(t.spec.square ? t.block : 1),
        count(along * ceil_div(t.outer, lines)) {}

  constexpr ValueTile operator[](int64_t i) const {
    const int64_t begin = i % along * length;
    return {i / along * lines, lines, begin, begin + length};
  }
};

/// Where the amaxes of a group begin among those of all.
constexpr int64_t first_amax(const QuantSpec& spec, Direction direction, int64_t group, int64_t begin, int64_t cols) {
  if (spec.row_scaled || spec.row().scope == Scope::row) return direction == Direction::rowwise ? begin : group * cols;
  return group;
}

}  // namespace quire::cuda
