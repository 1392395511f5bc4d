// Quantization of tiles, both directions from one read, for specs whose families and ways of rounding are compiled in.
#pragma once

#include "quire/cuda/kernels/tile_squares.cuh"

namespace quire::cuda {

/// Codes of a run of a row, and its scale where that is its turn.
template <QuantSpec kSpec, DType kDType>
__device__ void write_row(const TileLines<kSpec, kDType>& lines, const TileWork& tile, std::array<int, 2> row_and_col,
                          const BlockScale& scale, ScaledRun<kSpec>&& run) {
  const auto [line, position] = row_and_col;
  if (lines.writes_scale(line, position)) lines.write_scale(scale, line, position);
  lines.write_run(run, tile.random, line, position);
}

/// The rows of a tile; what columns need is kept. Returns what it has seen of all, where nothing else
/// measures the amax.
template <QuantSpec kSpec, DType kDType>
__device__ Largest<kDType> quantize_rows(const TileJob& job, const TileWork& tile) {
  using Lines = TileLines<kSpec, kDType>;
  constexpr unsigned lanes = Lines::kOfBlocks ? static_cast<unsigned>(kSpec.row().block / kRun) : 1;
  const bool wanted = tile.wants(job.rowwise);
  Lines lines(tile.spec, job, Direction::rowwise, tile.x, tile.place);
  if constexpr (Lines::kByTable) {
    __shared__ float multipliers[Lines::kMultipliers];
    lines.tabulate(multipliers);
    __syncthreads();
  }
  const BlockScale of_tensor = kSpec.row().scope == Scope::tensor ? lines.scale_of(lines.above, true) : BlockScale{};
  Largest<kDType> seen_of_all;
  const auto quantize_run = [&](int row, int col, const auto& words) {
    if (job.columnwise.present()) keep<kDType>(tile.memory, row, col, words);
    if constexpr (kSpec.row().scope == Scope::tensor) {
      QUIRE_UNROLL
      for (const uint32_t word : words) seen_of_all.add(word);
    }
    if (!wanted) return;
    const Lines own = lines.of_line(row);
    const auto value = [&](int i) { return value_at<kDType>(words, i); };
    BlockScale scale = of_tensor;
    float largest = 0;
    if constexpr (kSpec.row().scope == Scope::row) scale = own.scale_of(own.above, true);
    if constexpr (Lines::kOfBlocks) {
      const Seen<kDType> seen([&](auto& of) {
        QUIRE_UNROLL
        for (const uint32_t word : words) of.add(word);
        of.merge();
        QUIRE_UNROLL
        for (unsigned bit = 1; bit < lanes; bit *= 2) of.join(bit);
      });
      largest = seen.all.of(0);
      scale = own.scale_of(seen.most.of(0), is_finite(largest), value);
    }
    write_row<kSpec>(own, tile, {row, col}, scale, ScaledRun<kSpec>(scale.multiplier, largest, value));
  };
  if constexpr (Lines::kOfBlocks)
    each_run_ahead<kDType>(tile.x, tile.place, quantize_run);
  else
    each_run<kDType>(tile.x, tile.place, quantize_run);
  if (wanted && tile.place.first() && threadIdx.x == 0) lines.write_above(job.rowwise.amaxes != nullptr);
  seen_of_all.merge();
  return seen_of_all;
}

/// The same of squares, whose tile is kept.
template <QuantSpec kSpec, DType kDType>
__device__ void quantize_rows(const TileJob& job, const TileWork& tile, Squares<kSpec, kDType>& squares) {
  if (!tile.wants(job.rowwise)) return;
  const TileLines<kSpec, kDType> lines(tile.spec, job, Direction::rowwise, tile.x, tile.place);
  squares.find_scales(lines, tile.memory);
#pragma unroll 1
  for (int row = first_row(), col = run_col(); row < kTile; row += kRowStep) {
    const auto words = kept<kDType>(tile.memory, row, col);
    const BlockScale scale = squares.scale(row, col);
    write_row<kSpec>(lines, tile, {row, col}, scale,
                     ScaledRun<kSpec>(scale.multiplier, squares.largest(row, col),
                                      [&](int i) { return value_at<kDType>(words, i); }));
  }
  if (tile.place.first() && threadIdx.x == 0) lines.write_above(true);
}

/// A scale, and the largest magnitude under it, or NaN.
struct ScaleAndLargest {
  BlockScale scale;
  float largest = 0;
};

/// The scales of a share of columns: of their blocks, or the tensor's. Squares have theirs, transformed columns find
/// them later.
template <class Share, QuantSpec kSpec, DType kDType>
__device__ void find_scales(const TileLines<kSpec, kDType>& lines, int line,
                            const Columns<kDType, Share::kCols>& columns, ScaleAndLargest (&found)[Share::kCols]) {
  using Lines = TileLines<kSpec, kDType>;
  if constexpr (!Lines::kOfBlocks) {
    QUIRE_UNROLL
    for (int c = 0; c < Share::kCols; ++c) {
      const Lines own = lines.of_line(line + c);
      found[c].scale = own.scale_of(own.above, true);
    }
  } else if constexpr (kSpec.hadamard == Hadamard::off && !kSpec.square) {
    QUIRE_UNROLL
    for (int w = 0; w < columns.kPerRow; ++w) {
      const Seen<kDType> seen([&](auto& of) {
        QUIRE_UNROLL
        for (int r = 0; r < kRun; ++r) of.add(columns.rows[r][w]);
        QUIRE_UNROLL
        for (unsigned n = 1; n < kSpec.row().block / kRun; n *= 2) of.join(n * Share::kRowBit);
      });
      constexpr int series = Share::kCols / columns.kPerRow;
      QUIRE_UNROLL
      for (int s = 0; s < series; ++s) {
        const int c = w * series + s;
        found[c].largest = seen.all.of(s);
        found[c].scale = lines.of_line(line + c).scale_of(seen.most.of(s), is_finite(found[c].largest),
                                                          [&](int r) { return columns.value(r, c); });
      }
    }
  }
}

/// 16 rows of a column, and the scale of its block: a transformed column finds it here.
template <QuantSpec kSpec, class AnyColumns, class Lines>
__device__ ScaledRun<kSpec> run_of(const Lines& lines, const AnyColumns& columns, int c, ScaleAndLargest& found) {
  if constexpr (kSpec.hadamard == Hadamard::off) {
    return {found.scale.multiplier, found.largest, [&](int r) { return columns.value(r, c); }};
  } else {
    const auto words = transformed(columns, c, kSpec.hadamard == Hadamard::signs);
    const Seen<DType::bf16> seen([&](auto& of) {
      QUIRE_UNROLL
      for (const uint32_t word : words) of.add(word);
      of.merge();
    });
    found.largest = seen.all.of(0);
    found.scale = lines.scale_of(seen.most.of(0), is_finite(found.largest));
    return {found.scale.multiplier, found.largest, [&](int r) { return value_at<DType::bf16>(words, r); }};
  }
}

/// Codes of a share whose lines run against memory: those of a row are written together.
template <class Share, QuantSpec kSpec, DType kDType>
__device__ void write_across(const TileLines<kSpec, kDType>& lines, const Columns<kDType, Share::kCols>& columns,
                             const ScaleAndLargest (&found)[Share::kCols], int line, int position) {
  QUIRE_UNROLL
  for (int r = 0; r < kRun; ++r) {
    if (position + r >= lines.positions || line >= lines.lines) continue;
    float v[Share::kCols];
    QUIRE_UNROLL
    for (int c = 0; c < Share::kCols; ++c) v[c] = columns.value(r, c) * found[c].scale.multiplier;
    const uint32_t word = two_bytes<kSpec.element>(v[0], v[1]) | two_bytes<kSpec.element>(v[2], v[3]) << 16;
    write_words<false>(lines.codes + (position + r) * lines.position_step + line, std::array{word}, lines.lines - line);
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
    const int position = share.row, line = share.col;
    ScaleAndLargest found[Share::kCols];
    find_scales<Share>(lines, line, columns, found);
    QUIRE_UNROLL
    for (int c = 0; c < Share::kCols; ++c) {
      if constexpr (kSpec.square)
        found[c] = {squares->scale(share.row, share.col + c), squares->largest(share.row, share.col + c)};
      if constexpr (kSpec.row().transposed) {
        ScaledRun<kSpec> run = run_of<kSpec>(lines, columns, c, found[c]);
        lines.write_run(run, tile.random, line + c, position);
      }
      if (lines.writes_scale(line + c, position))
        lines.of_line(line + c).write_scale(found[c].scale, line + c, position);
    }
    if constexpr (!kSpec.row().transposed) write_across<Share>(lines, columns, found, line, position);
  }
}

/// Bits of the amax of a group.
__device__ inline uint32_t* amax_of(const TileSide& side, int64_t group) {
  return reinterpret_cast<uint32_t*>(side.side.amax + side.groups[group].at[2]);
}

/// Whoever measures the amax beside the codes gives it to both directions.
template <DType kDType>
__device__ void store_amax(const TileJob& job, const Largest<kDType>& seen, int64_t group) {
  const auto measures = [](const TileSide& side) { return side.present() && !side.amaxes; };
  if (!measures(job.rowwise) && !measures(job.columnwise)) return;
  const uint32_t bits = largest_of_block(seen.of(0));
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
    const Largest<kDType> seen = quantize_rows<kSpec, kDType>(job, tile);
    if constexpr (kSpec.row().scope == Scope::tensor) store_amax<kDType>(job, seen, place.group);
  }
  if (!tile.wants(job.columnwise)) return;
  TileLines<kSpec, kDType> lines(spec, job, Direction::columnwise, x, place);
  if constexpr (lines.kByTable) {
    __shared__ float multipliers[lines.kMultipliers];
    lines.tabulate(multipliers);
  }
  __syncthreads();
  if constexpr (kSpec.square) squares->find_scales(lines, memory);
  if (place.first() && threadIdx.x == 0) lines.write_above(job.columnwise.amaxes != nullptr);
  quantize_columns<kSpec, kDType>(lines, tile, squares);
}

/// Blocks of threads that a multiprocessor has at least: while one waits at its barrier, the others read. Kernels that
/// need more than 80 registers would keep some of them in memory.
constexpr unsigned tile_blocks(const QuantSpec& spec, DType dtype) {
  const bool many_registers =
      spec.stochastic || spec.four_over_six != FourOverSix::off || spec.row_scaled || dtype == DType::f32;
  return many_registers ? 2 : 3;
}

}  // namespace quire::cuda

/// The kernel of a spec for a dtype of x.
#define QUIRE_TILE_KERNEL(name, dtype, ...)                                                                   \
  extern "C" __global__ void __launch_bounds__(                                                               \
      quire::cuda::kTileThreads, quire::cuda::tile_blocks(quire::QuantSpec __VA_ARGS__, quire::DType::dtype)) \
      name##_##dtype(const __grid_constant__ quire::cuda::TileJob job) {                                      \
    quire::cuda::quantize_tile<quire::QuantSpec __VA_ARGS__, quire::DType::dtype>(job);                       \
  }
/// The kernels of a spec, one for each dtype of x.
#define QUIRE_TILE_KERNELS(name, ...)       \
  QUIRE_TILE_KERNEL(name, f32, __VA_ARGS__) \
  QUIRE_TILE_KERNEL(name, f16, __VA_ARGS__) \
  QUIRE_TILE_KERNEL(name, bf16, __VA_ARGS__)
