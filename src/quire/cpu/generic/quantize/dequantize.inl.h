// Dequantization of one direction: codes of pieces of lines times one value per block.
#pragma once

#include "quire/cpu/generic/elements/codes.inl.h"
#include "quire/cpu/generic/elements/encode.inl.h"
#include "quire/cpu/generic/elements/lines.inl.h"
#include "quire/cpu/generic/elements/plain.inl.h"
#include "quire/cpu/generic/elements/transpose.inl.h"
#include "quire/cpu/generic/elements/vectors.inl.h"
#include "quire/cpu/generic/quantize/amax.inl.h"
#include "quire/cpu/generic/quantize/decode_tables.inl.h"
#include "quire/cpu/generic/quantize/nvfp4.inl.h"
#include "quire/cpu/generic/quantize/quantize_rows.inl.h"
#include "quire/cpu/generic/quantize/scales.inl.h"

/// Sizes of the direction that is decoded.
struct Extent {
  int64_t outer, contraction, blocks;
};

Extent extent_of(const DequantizeProblem& p) {
  const bool rowwise = p.direction == Direction::rowwise;
  const int64_t outer = rowwise ? p.rows : p.cols;
  const int64_t contraction = rowwise ? p.cols : columnwise_tokens(p.spec, p.rows);
  return {outer, contraction, block_count(p.spec, contraction)};
}

/// Scales of `count` stored blocks of a line, as what multiplies codes; whole vectors.
template <ScaleKind S>
void block_values(const DequantizeProblem& p, int64_t line, const Stored<S>* stored, int64_t count, float* values) {
  if constexpr (S == ScaleKind::f32) {
    std::copy_n(stored, count, values);
  } else {
    const float g = S == ScaleKind::two_level ? p.amax[amax_index(p.spec, line)] : 0.0f;
    const auto decode = [&](const auto& value) {
      for (int64_t i = 0; i < count; i += kLanes) store(values + i, value(load_u8(stored + i)));
    };
    if constexpr (S == ScaleKind::e8m0)
      decode([&](U32 byte) { return e8m0_values(byte); });
    else if (p.spec.global == Global::multiplier)  // numerics.md 5.11
      decode([&](U32 byte) { return decode_lanes<kBlockScaleFormat>(byte) * g; });
    else if (p.spec.global == Global::divisor)
      decode([&](U32 byte) { return decode_lanes<kBlockScaleFormat>(byte) / g; });
    else  // numerics.md 5.1, 0.6
      decode([g, constant = 1.0f / (6.0f * p.spec.block_scale_max())](U32 byte) {
        return decode_lanes<kBlockScaleFormat>(byte) * g * constant;
      });
  }
}

/// Values of codes, whole quads, times the scales of their blocks of N.
template <Format F, int64_t N, Known kKnown, DType D>
inline void decode_piece(const uint8_t* codes, int64_t count, const float* scale, const Sink<Plain<D>>& out) {
  const auto value = [&](int64_t j) {
    const F32 code = kKnown == Known::nothing ? decode_lanes<F>(load_u8(codes + j)) : decode_finite<F>(codes + j);
    return code * broadcast(scale[j / N]);
  };
  for (int64_t i = 0; i < count; i += kQuad) {
    alignas(64) Plain<D> quad[kQuad];
    ask_ahead(codes + i);
#pragma GCC unroll 2
    for (int64_t j = 0; j < kQuad; j += 2 * kLanes) store_as<D, kKnown>(quad + j, value(i + j), value(i + j + kLanes));
    out.put(i, quad);
  }
}

/// Whether any code times any of the scales is a bfloat16: a code has few bits, and a power of two moves them only,
/// down to the least subnormal number.
template <Format F>
inline bool all_products_are_bf16(const float* scale, int64_t count) {
  constexpr uint32_t least = static_cast<uint32_t>(std::max(1, row(F).bias + row(F).man_bits - 1 - 133 + 127)) << 23;
  uint32_t rest = 0, smallest = ~0u;
  for (int64_t i = 0; i < count; ++i) {
    const auto bits = std::bit_cast<uint32_t>(scale[i]);
    rest |= bits & 0x807FFFFFu;
    smallest = std::min(smallest, bits);
  }
  return rest == 0 && smallest >= least;
}

/// What is known of the products of codes and scales. What is no number may be a code, a scale, or a product of both.
template <Format F, DType D>
inline Known known_of(bool finite_codes, const std::span<const float>& scale) {
  const auto count = std::ssize(scale);
  if (!finite_codes || line_magnitude<DType::f32, false>(scale.data(), count) >= kInfinity<DType::f32>)
    return Known::nothing;
  return D == DType::bf16 && all_products_are_bf16<F>(scale.data(), count) ? Known::exact : Known::no_nan;
}

template <class Body>
inline void with_known(Known known, const Body& body) {
  if (known == Known::nothing) return body(std::integral_constant<Known, Known::nothing>{});
  if (known == Known::exact) return body(std::integral_constant<Known, Known::exact>{});
  body(std::integral_constant<Known, Known::no_nan>{});
}

/// Values of codes, packed if they are of 4 bits, whole quads, times the scales of `count` blocks.
template <Format F, ScaleKind S, DType D>
void decode_line(const uint8_t* codes, int64_t padded, const std::span<const float>& scale, const Sink<Plain<D>>& out) {
  constexpr int64_t n = block_of(S);
  constexpr bool packed = row(F).packed();
  const auto blocks = std::ssize(scale);
  // By tables, if there are some for this format, codes are finite and no scale is extreme.
  const bool finite_codes = packed || all_finite<F, kQuad>(codes, padded);
  if constexpr (D == DType::bf16 && ((packed && kHasWordTables) || (S == ScaleKind::f32 && has_tables(F))))
    if (finite_codes && all_are_moderate(scale.data(), blocks)) {
      if constexpr (packed)
        return decode_nibbles<n>(codes, padded, scale.data(), out);
      else
        return decode_bytes<F, n>(codes, padded, scale.data(), out);
    }
  // Otherwise one by one, a byte each, rounded by what is known of the products.
  alignas(64) uint8_t unpacked[packed ? kPieceOfLine : 1];
  if constexpr (packed) {
    unpack_line(codes, padded, unpacked);
    codes = unpacked;
  }
  with_known(known_of<F, D>(finite_codes, scale),
             [&](auto known) { decode_piece<F, n, known, D>(codes, padded, scale.data(), out); });
}

/// Scales of blocks [blocks[0], blocks[1]) of a line, in a row.
template <ScaleKind S>
void gather_scales(const DequantizeProblem& p, const Extent& e, int64_t line, std::array<int64_t, 2> blocks,
                   Stored<S>* to) {
  const auto* stored = static_cast<const Stored<S>*>(p.scale);
  const int64_t count = blocks[1] - blocks[0];
  const SideGrid grid{p.spec, p.direction, e.outer, e.blocks};
  if (S != ScaleKind::f32 && !p.spec.swizzled && !blocks_first(p.spec, p.direction))
    std::memcpy(to, stored + scale_index(grid, line, blocks[0]), static_cast<size_t>(count));
  else
    for (int64_t i = 0; i < count; ++i) to[i] = stored[scale_index(grid, line, blocks[0] + i)];
}

/// Calls decode(sink), which writes whole quads, for a piece of a line of the result.
template <DType D, class Decode>
inline void with_sink(const DequantizeProblem& p, const Tile& at, const Decode& decode) {
  auto* to = static_cast<Plain<D>*>(p.out.data) + at.row * p.out.row_stride + at.col;
  const bool streams = p.out.rows * p.out.cols * size_of(D) >= kStreamBytes;
  if (at.cols % kQuad == 0 && (!streams || reinterpret_cast<uintptr_t>(to) % 64 == 0)) return decode({to, streams});
  alignas(64) Plain<D> values[kPieceOfLine];
  decode({values, false});
  put(reinterpret_cast<const uint8_t*>(values), at.cols * size_of(D), reinterpret_cast<uint8_t*>(to), streams);
}

/// Decodes a piece of a line whose codes are padded to whole quads, and packed if they are of 4 bits.
template <Format F, ScaleKind S, DType D>
void dequantize_piece(const DequantizeProblem& p, const Extent& e, const Tile& at, const uint8_t* codes) {
  constexpr int64_t n = block_of(S);
  const int64_t padded = round_up(at.cols, kQuad), count = ceil_div(at.cols, n);
  // The scales of the blocks of this piece, or the one of the line, repeated.
  const bool by_blocks = p.spec.row().scope == Scope::block;
  const int64_t first = by_blocks ? at.col / n : 0, stored = by_blocks ? count : 1;
  alignas(64) Stored<S> gathered[kPieceOfLine / n + kLanes] = {};
  alignas(64) float scale[kPieceOfLine / n + kLanes];
  gather_scales<S>(p, e, at.row, {first, first + stored}, gathered);
  block_values<S>(p, at.row, gathered, stored, scale);
  if (!by_blocks) std::fill(scale + 1, scale + ceil_div(padded, n), scale[0]);
  const std::span<const float> scales(scale, static_cast<size_t>(count));
  with_sink<D>(p, at, [&](const Sink<Plain<D>>& out) { decode_line<F, S, D>(codes, padded, scales, out); });
}

using DequantizePiece = void (*)(const DequantizeProblem&, const Extent&, const Tile&, const uint8_t* codes);

DequantizePiece piece_dequantizer(const QuantSpec& spec, DType dtype) {
  DequantizePiece found = nullptr;
  with_kinds(spec, dtype, [&](auto f, auto s, auto d) { found = dequantize_piece<f, s, d>; });
  return found;
}

/// A piece of a line whose codes are contiguous.
void dequantize_along(const DequantizeProblem& p, const Extent& e, const Tile& at, DequantizePiece decode) {
  alignas(64) uint8_t codes[kPieceOfLine];
  const int64_t first = data_index({p.spec, p.direction, e.outer, e.contraction}, at.row, at.col);
  const auto* data = static_cast<const uint8_t*>(p.data) + (p.spec.packed() ? first / 2 : first);
  if (at.cols % kQuad == 0) return decode(p, e, at, data);
  const int64_t bytes = p.spec.packed() ? ceil_div(at.cols, 2) : at.cols;
  std::memcpy(codes, data, static_cast<size_t>(bytes));
  std::fill(codes + bytes, codes + round_up(at.cols, kQuad), uint8_t{0});
  decode(p, e, at, codes);
}

/// A tile whose lines run against memory, transposed: codes, and the bytes of the scales of a line's blocks.
struct CodedTile {
  alignas(64) uint8_t codes[kTile][kTile], scales[kTile][kLaneGroup];
};

template <Format F, ScaleKind S, DType D>
void dequantize_tile(const DequantizeProblem& p, const Tile& tile, const CodedTile& from) {
  if constexpr (!row(F).packed() && S != ScaleKind::f32) {
    constexpr int64_t n = block_of(S), per_line = round_up(kTile / n, kLanes);
    alignas(64) float scale[kTile][per_line];
    for (int64_t i = 0; i < tile.rows; ++i) block_values<S>(p, tile.row + i, from.scales[i], per_line, scale[i]);
    const bool finite_codes = all_finite<F, kQuad>(from.codes[0], tile.rows * kTile);
    with_known(known_of<F, D>(finite_codes, {scale[0], static_cast<size_t>(tile.rows * per_line)}), [&](auto known) {
      for (int64_t i = 0; i < tile.rows; ++i)
        with_sink<D>(p, {tile.row + i, tile.col, 1, tile.cols}, [&](const Sink<Plain<D>>& out) {
          decode_piece<F, n, known, D>(from.codes[i], round_up(tile.cols, kQuad), scale[i], out);
        });
    });
  }
}

using DequantizeTile = void (*)(const DequantizeProblem&, const Tile&, const CodedTile&);

DequantizeTile tile_dequantizer(const QuantSpec& spec, DType dtype) {
  DequantizeTile found = nullptr;
  with_kinds(spec, dtype, [&](auto f, auto s, auto d) { found = dequantize_tile<f, s, d>; });
  return found;
}

/// A tile whose lines run against memory, and so do their scales unless these are swizzled.
void dequantize_across(const DequantizeProblem& p, const Extent& e, const Tile& tile, DequantizeTile decode) {
  alignas(64) uint8_t rows[kTile][kTile] = {};
  CodedTile coded;
  const auto read = [&](const void* from, int64_t stride, int64_t count) {
    for (int64_t j = 0; j < count; ++j) {
      const uint8_t* line = static_cast<const uint8_t*>(from) + j * stride;
      prefetch(line + kTile, kTile);
      std::memcpy(rows[j], line, static_cast<size_t>(tile.rows));
    }
  };
  // Codes: read the rows that cross these lines, and transpose them.
  const SideGrid codes{p.spec, p.direction, e.outer, e.contraction}, scales{p.spec, p.direction, e.outer, e.blocks};
  const auto *data = static_cast<const uint8_t*>(p.data), *scale = static_cast<const uint8_t*>(p.scale);
  read(data + data_index(codes, tile.row, tile.col), e.outer, tile.cols);
  transpose_tile(rows, kTile, tile.rows, coded.codes);
  // Scales: the same by way of `rows`, which the codes no longer need.
  const int64_t block = p.spec.row().block, first = tile.col / block, blocks = ceil_div(tile.cols, block);
  // What lies past the last block is looked at too: the byte of an ordinary scale of any kind.
  std::memset(rows, 0x40, kLaneGroup * kTile);
  if (p.spec.swizzled)
    for (int64_t b = 0; b < blocks; ++b)
      for (int64_t i = 0; i < tile.rows; ++i) rows[b][i] = scale[scale_index(scales, tile.row + i, first + b)];
  else
    read(scale + scale_index(scales, tile.row, first), e.outer, blocks);
  for (int64_t i = 0; i < tile.rows; i += kLaneGroup) transpose_codes(rows[0] + i, kTile, coded.scales[i], kLaneGroup);
  decode(p, tile, coded);
}

void dequantize(const DequantizeProblem& p) {
  const Extent e = extent_of(p);
  const bool across = blocks_first(p.spec, p.direction);
  const DequantizePiece along = piece_dequantizer(p.spec, p.out.dtype);
  const DequantizeTile turned = tile_dequantizer(p.spec, p.out.dtype);
  // Tiles in the order in which codes lie in memory: as lines, or as rows that cross them.
  const Matrix lines{nullptr, DType::u8, e.outer, e.contraction, 0},
      rows{nullptr, DType::u8, e.contraction, e.outer, 0};
  const int64_t height = across ? kTile : 1, width = across ? kTile : kPieceOfLine;
  const Matrix& memory = across ? rows : lines;
  const int64_t tiles = ceil_div(memory.rows, height) * ceil_div(memory.cols, width);
  parallel_for(tiles, kGrain / (height * width), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const Tile at = tile_at(memory, height, width, t);
      if (across)
        dequantize_across(p, e, {at.col, at.row, at.cols, at.rows}, turned);
      else
        dequantize_along(p, e, at, along);
    }
    finish_streams();
  });
}
