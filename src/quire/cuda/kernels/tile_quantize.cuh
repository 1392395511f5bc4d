// Quantization of tiles, both directions from one read, for specs whose families and ways of rounding are compiled in.
#pragma once

#include "quire/cuda/kernels/tile_codes.cuh"
#include "quire/spec/block_scale.h"

namespace quire::cuda {

/// The spec that a kernel is compiled for, with what is cheap to ask at run time from the one that is asked for.
template <QuantSpec kSpec>
__device__ QuantSpec with_flags(const QuantSpec& asked) {
  QuantSpec spec = kSpec;
  spec.nan = asked.nan, spec.swizzled = asked.swizzled, spec.given = asked.given, spec.global = asked.global;
  spec.pow2 = asked.pow2, spec.epsilon = asked.epsilon;
  return spec;
}

/// One direction of one group.
template <QuantSpec kSpec, DType kDType>
struct TileLines {
  struct Values {
    DType dtype;
  };
  static constexpr bool kOfBlocks = kSpec.row().scope == Scope::block;

  const QuantSpec& spec;
  Direction direction;
  Values x{kDType};  ///< for f32_scale()
  int64_t outer, contraction, blocks;
  Side side;
  const float* given;
  float above = 0;       ///< number_above()
  GlobalScale global{};  ///< of two levels

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
    above = number_above(spec, from.amaxes ? from.amaxes[group] : 0, given);
    if constexpr (kSpec.row().scale == ScaleKind::two_level) global = global_scale(above, spec);
  }

  __device__ BlockScale scale_of(float amax, bool finite) const {
    BlockScale found;
    if constexpr (kSpec.row().scale == ScaleKind::f32) found = f32_scale(*this, amax, given);
    if constexpr (kSpec.row().scale == ScaleKind::e8m0) {
      found.byte = e8m0_scale(amax, kSpec.element), found.multiplier = e8m0_multiplier(found.byte);
    }
    if constexpr (kSpec.row().scale == ScaleKind::two_level) {
      const float target = amax * global.block_mult;
      found.byte = encode_fast<kBlockScaleFormat>(kFloatMax < target ? kFloatMax : target);
      found.multiplier = nvfp4_multiplier(decode_fast<kBlockScaleFormat>(found.byte), global);
    }
    if (kOfBlocks && spec.nan && !finite) {
      found.stored = std::numeric_limits<float>::quiet_NaN();
      found.byte = kSpec.row().scale == ScaleKind::e8m0 ? kE8m0Nan : kBlockScaleNan;
    }
    return found;
  }

  /// Of the block that holds a position of a line.
  __device__ void write_scale(const BlockScale& scale, int64_t line, int64_t position) const {
    if (line >= outer || position >= contraction) return;
    constexpr int64_t block = kOfBlocks ? kSpec.row().block : 1;
    const int64_t i = scale_index({spec, direction, outer, blocks}, line, kOfBlocks ? position / block : 0);
    if constexpr (has_byte_scales(kSpec))
      static_cast<uint8_t*>(side.scale)[i] = scale.byte;
    else
      static_cast<float*>(side.scale)[i] = scale.stored;
  }

  /// What is stored of the whole group; its amax unless the blocks of threads measure it together.
  __device__ void write_above(bool measured) const {
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
};

/// The tile of a block of threads.
struct TileWork {
  const QuantSpec& spec;
  Matrix x;  ///< of its group
  TilePlace place;
  Randomness random;
  void* memory;  ///< shared, for what columns need
};

/// The rows of a tile; what columns need is kept. Returns what it has seen of all, where nothing else
/// measures the amax.
template <QuantSpec kSpec, DType kDType>
__device__ Seen<kDType> quantize_rows(const TileJob& job, const TileWork& tile) {
  const auto& [spec, x, place, random, memory] = tile;
  using Lines = TileLines<kSpec, kDType>;
  constexpr unsigned lanes = Lines::kOfBlocks ? static_cast<unsigned>(kSpec.row().block / kRun) : 1;
  const Lines lines(spec, job, Direction::rowwise, x, place.group);
  const BlockScale of_tensor = Lines::kOfBlocks ? BlockScale{} : lines.scale_of(lines.above, true);
  const bool wanted = job.rowwise.present() && job.rowwise.groups[place.group].rows > 0;
  Seen<kDType> seen_of_all;
  each_run<kDType>(x, place, [&](int row, int col, const auto& words) {
    if (job.columnwise.present()) keep<kDType>(tile.memory, row, col, words);
    Seen<kDType> seen;
    QUIRE_UNROLL
    for (const uint32_t word : words) seen.add(word);
    if constexpr (!Lines::kOfBlocks) seen_of_all.add(seen.most);
    if (!wanted) return;
    BlockScale scale = of_tensor;
    const int64_t line = place.row + row, position = place.col + col;
    if constexpr (Lines::kOfBlocks) {
      if (spec.nan) {
        QUIRE_UNROLL
        for (const uint32_t word : words) seen.add_to_all(word);
      }
      seen.merge(spec.nan);
      QUIRE_UNROLL
      for (unsigned bit = 1; bit < lanes; bit *= 2) seen.join(bit, spec.nan);
      scale = lines.scale_of(seen.amax(0), seen.finite(0));
      if (col % kSpec.row().block == 0) lines.write_scale(scale, line, position);
    }
    float v[kRun];
    QUIRE_UNROLL
    for (int i = 0; i < kRun; ++i) v[i] = value_at<kDType>(words, i) * scale.multiplier;
    lines.write_run(v, random, line, position);
  });
  if (wanted && place.first() && threadIdx.x == 0) lines.write_above(job.rowwise.amaxes != nullptr);
  seen_of_all.merge(false);
  return seen_of_all;
}

/// The scales of a share of columns: of their blocks, or the tensor's. Transformed columns find theirs later.
template <class Share, QuantSpec kSpec, DType kDType>
__device__ void find_scales(const TileLines<kSpec, kDType>& lines, const Columns<kDType, Share::kCols>& columns,
                            BlockScale (&scales)[Share::kCols]) {
  using Lines = TileLines<kSpec, kDType>;
  if constexpr (!Lines::kOfBlocks) {
    QUIRE_UNROLL
    for (BlockScale& scale : scales) scale = lines.scale_of(lines.above, true);
  } else if constexpr (kSpec.hadamard == Hadamard::off) {
    Seen<kDType> seen[columns.kPerRow];
    QUIRE_UNROLL
    for (int w = 0; w < columns.kPerRow; ++w) {
      QUIRE_UNROLL
      for (int r = 0; r < kRun; ++r) seen[w].add(columns.rows[r][w]);
      if (lines.spec.nan) {
        QUIRE_UNROLL
        for (int r = 0; r < kRun; ++r) seen[w].add_to_all(columns.rows[r][w]);
      }
      QUIRE_UNROLL
      for (unsigned n = 1; n < kSpec.row().block / kRun; n *= 2) seen[w].join(n * Share::kRowBit, lines.spec.nan);
    }
    constexpr int series = Share::kCols / columns.kPerRow;
    QUIRE_UNROLL
    for (int c = 0; c < Share::kCols; ++c)
      scales[c] = lines.scale_of(seen[c / series].amax(c % series), seen[c / series].finite(c % series));
  }
}

/// 16 rows of transformed column c, multiplied by the scale of its block, which this finds.
template <QuantSpec kSpec, class AnyColumns, class Lines>
__device__ BlockScale transform(const Lines& lines, const AnyColumns& columns, int c, float (&v)[kRun]) {
  const auto words = transformed(columns, c, kSpec.hadamard == Hadamard::signs);
  Seen<DType::bf16> seen;
  QUIRE_UNROLL
  for (const uint32_t word : words) seen.add(word);
  if (lines.spec.nan) {
    QUIRE_UNROLL
    for (const uint32_t word : words) seen.add_to_all(word);
  }
  seen.merge(lines.spec.nan);
  const BlockScale scale = lines.scale_of(seen.amax(0), seen.finite(0));
  QUIRE_UNROLL
  for (int r = 0; r < kRun; ++r) v[r] = value_at<DType::bf16>(words, r) * scale.multiplier;
  return scale;
}

/// Codes of a share whose lines run against memory: those of a row are written together.
template <class Share, QuantSpec kSpec, DType kDType>
__device__ void write_across(const TileLines<kSpec, kDType>& lines, const Columns<kDType, Share::kCols>& columns,
                             const BlockScale (&scales)[Share::kCols], int64_t line, int64_t position) {
  QUIRE_UNROLL
  for (int r = 0; r < kRun; ++r) {
    if (position + r >= lines.contraction || line >= lines.outer) continue;
    float v[Share::kCols];
    QUIRE_UNROLL
    for (int c = 0; c < Share::kCols; ++c) v[c] = columns.value(r, c) * scales[c].multiplier;
    const uint32_t word = two_bytes<kSpec.element>(v[0], v[1]) | two_bytes<kSpec.element>(v[2], v[3]) << 16;
    const int64_t at = data_index({lines.spec, lines.direction, lines.outer, lines.contraction}, line, position + r);
    write_words<false>(static_cast<uint8_t*>(lines.side.data) + at, std::array{word}, lines.outer - line);
  }
}

/// The columns of a tile, 16 rows of some of them at a time.
template <QuantSpec kSpec, DType kDType>
__device__ void quantize_columns(const TileLines<kSpec, kDType>& lines, const Randomness& random,
                                 const TilePlace& place, const void* tile) {
  using Lines = TileLines<kSpec, kDType>;
  using Share = ColumnShare<!kSpec.row().transposed>;
  constexpr int64_t block = Lines::kOfBlocks ? kSpec.row().block : kRun;
#pragma unroll 1
  for (int turn = 0; turn < Share::kTurns; ++turn) {
    const Share share(turn);
    const Columns<kDType, Share::kCols> columns(tile, share.row, share.col);
    const int64_t position = place.row + share.row, line = place.col + share.col;
    BlockScale scales[Share::kCols];
    find_scales<Share>(lines, columns, scales);
    QUIRE_UNROLL
    for (int c = 0; c < Share::kCols; ++c) {
      float v[kRun];
      if constexpr (kSpec.hadamard != Hadamard::off) {
        scales[c] = transform<kSpec>(lines, columns, c, v);
      } else if constexpr (kSpec.row().transposed) {
        QUIRE_UNROLL
        for (int r = 0; r < kRun; ++r) v[r] = columns.value(r, c) * scales[c].multiplier;
      }
      if (Lines::kOfBlocks && share.row % block == 0) lines.write_scale(scales[c], line + c, position);
      if constexpr (kSpec.row().transposed) lines.write_run(v, random, line + c, position);
    }
    if constexpr (!kSpec.row().transposed) write_across<Share>(lines, columns, scales, line, position);
  }
}

/// Bits of the amax of a group.
__device__ inline uint32_t* amax_of(const TileSide& side, int64_t group) {
  return reinterpret_cast<uint32_t*>(side.side.amax + side.groups[group].at[2]);
}

/// Whoever measures the amax beside the codes gives it to both directions.
template <DType kDType>
__device__ void store_amax(const TileJob& job, const Seen<kDType>& seen, int64_t group) {
  const auto measures = [](const TileSide& side) { return side.present() && !side.amaxes; };
  if (!measures(job.rowwise) && !measures(job.columnwise)) return;
  const uint32_t bits = largest_of_block(seen.amax(0));
  if (threadIdx.x > 0) return;
  if (measures(job.rowwise)) atomicMax(amax_of(job.rowwise, group), bits);
  if (measures(job.columnwise)) atomicMax(amax_of(job.columnwise, group), bits);
}

template <QuantSpec kSpec, DType kDType>
__device__ void quantize_tile(const TileJob& job) {
  extern __shared__ uint4 tile[];
  const QuantSpec spec = with_flags<kSpec>(job.spec);
  const TilePlace place(job.rowwise.present() ? job.rowwise.groups : job.columnwise.groups, job.x.cols);
  if (place.group < 0 || !is_wanted(job.only, place.group)) return;
  const TileSide& any = job.rowwise.present() ? job.rowwise : job.columnwise;
  const Matrix x = group_matrix(job.x, job.each, place.group, any.groups[place.group]);
  Randomness random{};
  if constexpr (kSpec.stochastic) {
    random = job.random;
    random.seed += static_cast<uint64_t>(place.group);
    random = random.read();
  }
  const Seen<kDType> seen = quantize_rows<kSpec, kDType>(job, {spec, x, place, random, tile});
  if constexpr (kSpec.row().scope == Scope::tensor) store_amax<kDType>(job, seen, place.group);
  if (!job.columnwise.present() || job.columnwise.groups[place.group].rows == 0) return;
  __syncthreads();
  const TileLines<kSpec, kDType> lines(spec, job, Direction::columnwise, x, place.group);
  if (place.first() && threadIdx.x == 0) lines.write_above(job.columnwise.amaxes != nullptr);
  quantize_columns<kSpec, kDType>(lines, random, place, tile);
}

}  // namespace quire::cuda

/// The kernels of a spec, one for each dtype of x.
#define QUIRE_TILE_KERNELS(name, ...)                                                  \
  extern "C" __global__ void __launch_bounds__(quire::cuda::kTileThreads, 2)           \
      name##_f32(const __grid_constant__ quire::cuda::TileJob job) {                   \
    quire::cuda::quantize_tile<quire::QuantSpec __VA_ARGS__, quire::DType::f32>(job);  \
  }                                                                                    \
  extern "C" __global__ void __launch_bounds__(quire::cuda::kTileThreads, 2)           \
      name##_f16(const __grid_constant__ quire::cuda::TileJob job) {                   \
    quire::cuda::quantize_tile<quire::QuantSpec __VA_ARGS__, quire::DType::f16>(job);  \
  }                                                                                    \
  extern "C" __global__ void __launch_bounds__(quire::cuda::kTileThreads, 2)           \
      name##_bf16(const __grid_constant__ quire::cuda::TileJob job) {                  \
    quire::cuda::quantize_tile<quire::QuantSpec __VA_ARGS__, quire::DType::bf16>(job); \
  }
