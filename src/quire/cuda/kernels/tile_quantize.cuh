// Quantization of tiles, both directions from one read, for specs whose families and ways of rounding are compiled in.
#pragma once

#include "quire/cuda/kernels/tile_squares.cuh"

namespace quire::cuda {

/// Codes of a run of a row, and its scale where that is its turn.
template <class Lines, size_t kCount>
__device__ void write_row(const Lines& lines, const TileWork& tile, std::array<int, 2> row_and_col,
                          const std::array<uint32_t, kCount>& words, const BlockScale& scale) {
  const auto [row, col] = row_and_col;
  const int64_t line = tile.place.row + row, position = tile.place.col + col;
  if (lines.writes_scale(line, position)) lines.write_scale(scale, line, position);
  float v[kRun];
  QUIRE_UNROLL
  for (int i = 0; i < kRun; ++i) v[i] = value_at<Lines::kOfDType>(words, i) * scale.multiplier;
  lines.write_run(v, tile.random, line, position);
}

/// The rows of a tile; what columns need is kept. Returns what it has seen of all, where nothing else
/// measures the amax.
template <QuantSpec kSpec, DType kDType>
__device__ Seen<kDType> quantize_rows(const TileJob& job, const TileWork& tile) {
  using Lines = TileLines<kSpec, kDType>;
  constexpr unsigned lanes = Lines::kOfBlocks ? static_cast<unsigned>(kSpec.row().block / kRun) : 1;
  const bool nan = tile.spec.nan, wanted = tile.wants(job.rowwise);
  const Lines lines(tile.spec, job, Direction::rowwise, tile.x, tile.place.group);
  const BlockScale of_tensor = kSpec.row().scope == Scope::tensor ? lines.scale_of(lines.above, true) : BlockScale{};
  Seen<kDType> seen_of_all;
  each_run<kDType>(tile.x, tile.place, [&](int row, int col, const auto& words) {
    if (job.columnwise.present()) keep<kDType>(tile.memory, row, col, words);
    Seen<kDType> seen;
    seen.add(words, Lines::kOfBlocks && nan);
    if constexpr (!Lines::kOfBlocks) seen_of_all.add(seen.most);
    if (!wanted) return;
    const Lines own = lines.of_line(tile.place.row + row);
    BlockScale scale = of_tensor;
    if constexpr (kSpec.row().scope == Scope::row) scale = own.scale_of(own.above, true);
    if constexpr (Lines::kOfBlocks) {
      seen.merge(nan);
      QUIRE_UNROLL
      for (unsigned bit = 1; bit < lanes; bit *= 2) seen.join(bit, nan);
      scale = own.scale_of(seen.amax(0), seen.finite(0), [&](int i) { return value_at<kDType>(words, i); });
    }
    write_row(own, tile, {row, col}, words, scale);
  });
  if (wanted && tile.place.first() && threadIdx.x == 0) lines.write_above(job.rowwise.amaxes != nullptr);
  seen_of_all.merge(false);
  return seen_of_all;
}

/// The same of squares, whose tile is kept.
template <QuantSpec kSpec, DType kDType>
__device__ void quantize_rows(const TileJob& job, const TileWork& tile, Squares<kSpec, kDType>& squares) {
  if (!tile.wants(job.rowwise)) return;
  const TileLines<kSpec, kDType> lines(tile.spec, job, Direction::rowwise, tile.x, tile.place.group);
  squares.find_scales(lines, tile.memory);
  each_place([&](int row, int col) {
    write_row(lines, tile, {row, col}, kept<kDType>(tile.memory, row, col), squares.scale(row, col));
  });
  if (tile.place.first() && threadIdx.x == 0) lines.write_above(true);
}

/// The scales of a share of columns: of their blocks, or the tensor's. Squares have theirs, transformed columns find
/// them later.
template <class Share, QuantSpec kSpec, DType kDType>
__device__ void find_scales(const TileLines<kSpec, kDType>& lines, int64_t line,
                            const Columns<kDType, Share::kCols>& columns, BlockScale (&scales)[Share::kCols]) {
  using Lines = TileLines<kSpec, kDType>;
  if constexpr (!Lines::kOfBlocks) {
    QUIRE_UNROLL
    for (int c = 0; c < Share::kCols; ++c) {
      const Lines own = lines.of_line(line + c);
      scales[c] = own.scale_of(own.above, true);
    }
  } else if constexpr (kSpec.hadamard == Hadamard::off && !kSpec.square) {
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
      scales[c] =
          lines.of_line(line + c).scale_of(seen[c / series].amax(c % series), seen[c / series].finite(c % series),
                                           [&](int r) { return columns.value(r, c); });
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
__device__ void quantize_columns(const TileLines<kSpec, kDType>& lines, const TileWork& tile,
                                 const Squares<kSpec, kDType>* squares) {
  using Share = ColumnShare<!kSpec.row().transposed>;
#pragma unroll 1
  for (int turn = 0; turn < Share::kTurns; ++turn) {
    const Share share(turn);
    const Columns<kDType, Share::kCols> columns(tile.memory, share.row, share.col);
    const int64_t position = tile.place.row + share.row, line = tile.place.col + share.col;
    BlockScale scales[Share::kCols];
    find_scales<Share>(lines, line, columns, scales);
    QUIRE_UNROLL
    for (int c = 0; c < Share::kCols; ++c) {
      float v[kRun];
      if constexpr (kSpec.square) scales[c] = squares->scale(share.row, share.col + c);
      if constexpr (kSpec.hadamard != Hadamard::off) {
        scales[c] = transform<kSpec>(lines, columns, c, v);
      } else if constexpr (kSpec.row().transposed) {
        QUIRE_UNROLL
        for (int r = 0; r < kRun; ++r) v[r] = columns.value(r, c) * scales[c].multiplier;
      }
      if (lines.writes_scale(line + c, position)) lines.of_line(line + c).write_scale(scales[c], line + c, position);
      if constexpr (kSpec.row().transposed) lines.write_run(v, tile.random, line + c, position);
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
  extern __shared__ uint4 memory[];
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
  const TileWork tile{spec, x, place, random, memory};
  Squares<kSpec, kDType>* squares = nullptr;
  if constexpr (kSpec.square) {
    __shared__ Squares<kSpec, kDType> of_tile;
    squares = &of_tile;
    squares->measure(tile);
    quantize_rows(job, tile, *squares);
  } else {
    const Seen<kDType> seen = quantize_rows<kSpec, kDType>(job, tile);
    if constexpr (kSpec.row().scope == Scope::tensor) store_amax<kDType>(job, seen, place.group);
  }
  if (!tile.wants(job.columnwise)) return;
  __syncthreads();
  const TileLines<kSpec, kDType> lines(spec, job, Direction::columnwise, x, place.group);
  if constexpr (kSpec.square) squares->find_scales(lines, memory);
  if (place.first() && threadIdx.x == 0) lines.write_above(job.columnwise.amaxes != nullptr);
  quantize_columns<kSpec, kDType>(lines, tile, squares);
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
