// One direction of a tile's group: from what a block of values has to its scale, and where codes and scales are
// written.
#pragma once

#include "quire/cuda/kernels/quantize.h"
#include "quire/cuda/kernels/tile_codes.cuh"
#include "quire/spec/block_scale.h"

namespace quire::cuda {

/// The spec that a kernel is compiled for, with what is cheap to ask at run time from the one that is asked for.
template <QuantSpec kSpec>
__device__ QuantSpec with_flags(const QuantSpec& asked) {
  QuantSpec spec = kSpec;
  spec.nan = asked.nan, spec.swizzled = asked.swizzled, spec.given = asked.given, spec.global = asked.global;
  spec.pow2 = asked.pow2, spec.epsilon = asked.epsilon, spec.block_scale_max_256 = asked.block_scale_max_256;
  if (kSpec.four_over_six != FourOverSix::off) spec.four_over_six = asked.four_over_six;
  return spec;
}

/// One direction of one group.
template <QuantSpec kSpec, DType kDType>
struct TileLines {
  struct Values {
    DType dtype;
  };
  static constexpr DType kOfDType = kDType;
  static constexpr bool kOfBlocks = kSpec.row().scope == Scope::block;
  static constexpr bool kTriesTwo = kSpec.four_over_six != FourOverSix::off;             ///< scales of a block
  static constexpr bool kPerLine = kSpec.row_scaled || kSpec.row().scope == Scope::row;  ///< amaxes

  const QuantSpec& spec;
  Direction direction;
  Values x{kDType};  ///< for f32_scale()
  int64_t outer, contraction, blocks;
  Side side;
  const float* given;
  const float* amaxes = nullptr;  ///< of lines
  float above = 0;                ///< number_above()
  GlobalScale global{};           ///< of two levels

  __device__ TileLines(const QuantSpec& of, const TileJob& job, Direction along, const Matrix& m, int64_t group)
      : spec(of), direction(along) {
    const TileSide& from = along == Direction::rowwise ? job.rowwise : job.columnwise;
    const GroupPlace place = from.groups[group];
    outer = along == Direction::rowwise ? m.rows : m.cols;
    contraction = along == Direction::rowwise ? m.cols : columnwise_tokens(spec, m.rows);
    blocks = block_count(spec, contraction);
    constexpr int64_t width = has_byte_scales(kSpec) ? 1 : 4;
    side = {static_cast<uint8_t*>(from.side.data) + place.at[0],
            static_cast<uint8_t*>(from.side.scale) + place.at[1] * width,
            from.side.amax ? from.side.amax + place.at[2] : nullptr};
    given = job.scale ? job.scale + group : nullptr;
    if constexpr (kPerLine)
      amaxes = from.amaxes + first_amax(spec, along, group, place.begin, m.cols);
    else
      take(from.amaxes ? from.amaxes[group] : 0);
  }

  /// The same with what is above the blocks of one line.
  __device__ TileLines of_line(int64_t line) const {
    TileLines own = *this;
    if constexpr (kPerLine) own.take(line < outer ? amaxes[line] : 0);
    return own;
  }

  __device__ BlockScale scale_of(float amax, bool finite) const {
    BlockScale found;
    if constexpr (kSpec.row().scale == ScaleKind::f32) found = f32_scale(*this, amax, given);
    if constexpr (kSpec.row().scale == ScaleKind::e8m0) {
      found.byte = e8m0_scale(amax, kSpec.element), found.multiplier = e8m0_multiplier(found.byte);
    }
    if constexpr (kSpec.row().scale == ScaleKind::two_level) {
      const float target = amax * global.block_mult;
      found.byte = one_byte<kBlockScaleFormat>(kFloatMax < target ? kFloatMax : target);
      found.multiplier = nvfp4_multiplier(decode_fast<kBlockScaleFormat>(found.byte), global);
    }
    return kOfBlocks ? marked(found, spec, finite) : found;
  }

  /// The same of a block of 16 values, as value(i) gives them: 4over6 compares the errors of two scales.
  template <class Value>
  __device__ BlockScale scale_of(float amax, bool finite, Value&& value) const {
    if constexpr (!kTriesTwo) return scale_of(amax, finite);
    const auto [map4, map6] = four_over_six_scales(amax, global);
    return marked(error_of(map4, value) < error_of(map6, value) ? map4 : map6, spec, finite);
  }

  /// The error of 16 values of a line under a scale (line_error()): where one is NaN, so is the error.
  template <class Value>
  __device__ float error_of(const BlockScale& s, Value&& value) const {
    const ValueError error(spec, s, global.stored);
    float sum = 0;
    QUIRE_UNROLL
    for (int i = 0; i < kRun; ++i) {
      const float x = value(i);
      sum += error.of(x, rounded_to_e2m1(x * s.multiplier));
    }
    return sum;
  }

  /// Whether a scale is written with the run of a line that begins at a position: with the first one of the block, or
  /// of the line, and of the first line that shares a scale of float32.
  static __device__ bool writes_scale(int64_t line, int64_t position) {
    constexpr int64_t block = kOfBlocks ? kSpec.row().block : 1;
    if constexpr (!kOfBlocks) return kPerLine && position == 0;
    return position % block == 0 && (!kSpec.square || has_byte_scales(kSpec) || line % block == 0);
  }

  /// Of the block that holds a position of a line.
  __device__ void write_scale(const BlockScale& scale, int64_t line, int64_t position) const {
    if (line >= outer || position >= contraction) return;
    constexpr int64_t block = kOfBlocks ? kSpec.row().block : 1;
    if (kPerLine && kSpec.row().has_amax && position == 0) side.amax[line] = above;
    const int64_t i = scale_index({spec, direction, outer, blocks}, line, kOfBlocks ? position / block : 0);
    if constexpr (has_byte_scales(kSpec))
      static_cast<uint8_t*>(side.scale)[i] = scale.byte;
    else
      static_cast<float*>(side.scale)[i] = scale.stored;
  }

  /// What is stored of the whole group; its amax unless the blocks of threads measure it together.
  __device__ void write_above(bool measured) const {
    if constexpr (kPerLine) return;
    if (kSpec.row().has_amax && (kOfBlocks || measured)) *side.amax = above;
    if constexpr (!kOfBlocks) write_scale(f32_scale(*this, above, given), 0, 0);
  }

  __device__ std::array<uint32_t, 4> random_words(const Randomness& random, int64_t line, int64_t position) const {
    if constexpr (!kSpec.stochastic) return {};
    const uint64_t offset = direction == Direction::rowwise ? random.rowwise_offset : random.columnwise_offset;
    const int64_t number = random.number(direction, {outer, blocks}, line, position / kRun);
    return philox(random.seed, offset, static_cast<uint64_t>(number));
  }

  /// 16 values of a line, multiplied already.
  __device__ void write_run(const float (&x)[kRun], const Randomness& random, int64_t line, int64_t position) const {
    if (line >= outer || position >= contraction) return;
    const auto words = codes_of<kSpec>(x, random_words(random, line, position));
    const int64_t at = data_index({spec, direction, outer, contraction}, line, position);
    write_words<kSpec.packed()>(static_cast<uint8_t*>(side.data) + at / (kSpec.packed() ? 2 : 1), words,
                                contraction - position);
  }

 private:
  __device__ void take(float amax) {
    above = number_above(spec, amax, given);
    if constexpr (kSpec.row().scale == ScaleKind::two_level) global = global_scale(above, spec);
  }
};

/// The tile of a block of threads.
struct TileWork {
  const QuantSpec& spec;
  Matrix x;  ///< of its group
  TilePlace place;
  Randomness random;
  void* memory;  ///< shared, of the tile

  /// Whether this tile has rows of a direction that is asked for.
  __device__ bool wants(const TileSide& side) const { return side.present() && side.groups[place.group].rows > 0; }
};

}  // namespace quire::cuda
