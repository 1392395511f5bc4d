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

/// The E8M0 scale of an amax that is not NaN: e8m0_scale() and e8m0_multiplier() without branches.
__device__ inline BlockScale e8m0_block_scale(float amax, Format element) {
  const uint32_t u = std::bit_cast<uint32_t>(amax * (1.0f / largest(element)));
  const uint32_t up = u > 0x400000u ? (u + 0x7FFFFFu) >> 23 : 0u, byte = up < 254u ? up : 254u;
  const uint32_t multiplier = (254u - byte) << 23;
  BlockScale found;
  found.byte = static_cast<uint8_t>(byte);
  found.multiplier = std::bit_cast<float>(multiplier > 0x400000u ? multiplier : 0x400000u);
  return found;
}

/// swizzled_offset() from where a tile begins, which is where the pattern does.
constexpr int swizzled_in_tile(int line, int block) {
  return block / 4 * 512 + line % 32 * 16 + line / 32 * 4 + block % 4;
}
static_assert([] {
  for (int line = 0; line < kTile; ++line)
    for (int block = 0; block < 8; ++block)
      if (swizzled_offset(kTile + line, 8 + block, 40) != swizzled_offset(kTile, 8, 40) + swizzled_in_tile(line, block))
        return false;
  return true;
}());

/// One direction of a tile of a group. Lines and positions count from where the tile begins.
template <QuantSpec kSpec, DType kDType>
struct TileLines {
  struct Values {
    DType dtype;
  };
  static constexpr bool kOfBlocks = kSpec.row().scope == Scope::block;
  static constexpr bool kTriesTwo = kSpec.four_over_six != FourOverSix::off;             ///< scales of a block
  static constexpr bool kPerLine = kSpec.row_scaled || kSpec.row().scope == Scope::row;  ///< amaxes
  static constexpr int kBlock = kOfBlocks ? static_cast<int>(kSpec.row().block) : 1;
  static constexpr int64_t kInByte = kSpec.packed() ? 2 : 1;
  static constexpr int64_t kScaleSize = has_byte_scales(kSpec) ? 1 : 4;
  /// Two levels of scales, the upper one of which is the group's: few multipliers, each of which is computed once.
  static constexpr bool kByTable =
      kSpec.row().scale == ScaleKind::two_level && !kPerLine && !kTriesTwo && !kSpec.square;
  static constexpr int kMultipliers = kByTable ? 128 : 1;

  const QuantSpec& spec;
  Direction direction;
  Values x{kDType};  ///< for f32_scale()
  int64_t outer, contraction, blocks;
  int64_t line0, position0;          ///< of the tile
  int lines, positions;              ///< from there on, at most a tile's
  uint8_t *codes, *scales;           ///< of the tile
  int64_t line_step, position_step;  ///< bytes between lines, and codes between positions
  int64_t scale_line, scale_block;   ///< scales between lines, and between blocks of a line
  float* amax;                       ///< of the group
  const float* given;
  const float* amaxes = nullptr;       ///< of the lines of the tile
  const float* multipliers = nullptr;  ///< shared, kMultipliers of them
  float above = 0;                     ///< number_above()
  GlobalScale global{};                ///< of two levels

  __device__ TileLines(const QuantSpec& of, const TileJob& job, Direction along, const Matrix& m, const TilePlace& tile)
      : spec(of), direction(along) {
    const bool rowwise = along == Direction::rowwise;
    const TileSide& from = rowwise ? job.rowwise : job.columnwise;
    given = job.scale ? job.scale + tile.group : nullptr;
    if constexpr (!kPerLine) take(from.amaxes ? from.amaxes[tile.group] : 0);
    const GroupPlace place = from.groups[tile.group];
    outer = rowwise ? m.rows : m.cols;
    contraction = rowwise ? m.cols : columnwise_tokens(spec, m.rows);
    blocks = block_count(spec, contraction);
    line0 = rowwise ? tile.row : tile.col, position0 = rowwise ? tile.col : tile.row;
    lines = of_tile(outer - line0), positions = of_tile(contraction - position0);
    find_places(from.side, place);
    amax = from.side.amax ? from.side.amax + place.at[2] : nullptr;
    if constexpr (kPerLine) amaxes = from.amaxes + first_amax(spec, along, tile.group, place.begin, m.cols) + line0;
  }

  /// The same with what is above the blocks of one line.
  __device__ TileLines of_line(int line) const {
    TileLines own = *this;
    if constexpr (kPerLine) own.take(line < lines ? amaxes[line] : 0);
    return own;
  }

  /// Fills the table of multipliers, which scale_of() reads beyond a barrier. All threads of a block call this.
  __device__ void tabulate(float (&table)[kMultipliers]) {
    if constexpr (!kByTable) return;
    const unsigned byte = threadIdx.x;
    if (byte < kMultipliers) table[byte] = nvfp4_multiplier(decode_fast<kBlockScaleFormat>(byte), global);
    multipliers = table;
  }

  __device__ BlockScale scale_of(float amax_of_block, bool finite) const {
    BlockScale found;
    if constexpr (kSpec.row().scale == ScaleKind::f32) found = f32_scale(*this, amax_of_block, given);
    if constexpr (kSpec.row().scale == ScaleKind::e8m0) found = e8m0_block_scale(amax_of_block, kSpec.element);
    if constexpr (kSpec.row().scale == ScaleKind::two_level) {
      // What is infinite becomes the largest scale, as FLT_MAX does.
      found.byte = one_byte<kBlockScaleFormat>(amax_of_block * global.block_mult);
      // A sign comes from an amax that is an error, and is read by nobody.
      found.multiplier = kByTable ? multipliers[found.byte % kMultipliers]
                                  : nvfp4_multiplier(decode_fast<kBlockScaleFormat>(found.byte), global);
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
  __device__ bool writes_scale(int line, int position) const {
    if constexpr (!kOfBlocks) return kPerLine && begins_line(position);
    return position % kBlock == 0 && (!kSpec.square || has_byte_scales(kSpec) || line % kBlock == 0);
  }

  /// Of the block that holds a position of a line.
  __device__ void write_scale(const BlockScale& scale, int line, int position) const {
    if (line >= lines || position >= positions) return;
    if (kPerLine && kSpec.row().has_amax && begins_line(position)) amax[line0 + line] = above;
    const int block = kOfBlocks ? position / kBlock : 0;
    const bool swizzled = has_byte_scales(kSpec) && spec.swizzled;
    const int64_t i = swizzled ? swizzled_in_tile(line, block) : line * scale_line + block * scale_block;
    if constexpr (has_byte_scales(kSpec))
      scales[i] = scale.byte;
    else
      reinterpret_cast<float*>(scales)[i] = scale.stored;
  }

  /// What is stored of the whole group; its amax unless the blocks of threads measure it together.
  __device__ void write_above(bool measured) const {
    if constexpr (kPerLine) return;
    if (kSpec.row().has_amax && (kOfBlocks || measured)) *amax = above;
    if constexpr (!kOfBlocks) write_scale(f32_scale(*this, above, given), 0, 0);
  }

  __device__ std::array<uint32_t, 4> random_words(const Randomness& random, int line, int position) const {
    if constexpr (!kSpec.stochastic) return {};
    const uint64_t offset = direction == Direction::rowwise ? random.rowwise_offset : random.columnwise_offset;
    const int64_t row = line0 + line, block = (position0 + position) / kRun;
    const int64_t number =
        random.count == 1 ? row * blocks + block : random.number(direction, {outer, blocks}, row, block);
    return philox(random.seed, offset, static_cast<uint64_t>(number));
  }

  __device__ void write_run(ScaledRun<kSpec>& run, const Randomness& random, int line, int position) const {
    if (line >= lines || position >= positions) return;
    const auto words = codes_of<kSpec>(run, random_words(random, line, position));
    write_words<kSpec.packed()>(codes + line * line_step + position / static_cast<int>(kInByte), words,
                                positions - position);
  }

 private:
  __device__ void find_places(const Side& side, const GroupPlace& place) {
    const SideGrid of_codes{spec, direction, outer, contraction}, of_scales{spec, direction, outer, blocks};
    const int64_t block0 = kOfBlocks ? position0 / kBlock : 0;
    codes = static_cast<uint8_t*>(side.data) + place.at[0] + data_index(of_codes, line0, position0) / kInByte;
    scales = static_cast<uint8_t*>(side.scale) + (place.at[1] + scale_index(of_scales, line0, block0)) * kScaleSize;
    line_step = data_index(of_codes, 1, 0) / kInByte, position_step = data_index(of_codes, 0, 1);
    scale_line = scale_index(of_scales, 1, 0), scale_block = kOfBlocks ? scale_index(of_scales, 0, 1) : 0;
  }
  __device__ static int of_tile(int64_t left) { return static_cast<int>(left < kTile ? left : kTile); }
  __device__ bool begins_line(int position) const { return position == 0 && position0 == 0; }
  __device__ void take(float of) {
    above = number_above(spec, of, given);
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
