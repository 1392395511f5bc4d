// Block scales of an operand's lines, a K-panel of the contraction at a time, in the orders in which the product reads
// them; and which of them may be multiplied into codes.
#pragma once

#include "quire/cpu/generic/elements/codes.inl.h"
#include "quire/cpu/generic/elements/transpose.inl.h"
#include "quire/cpu/generic/elements/vectors.inl.h"
#include "quire/cpu/generic/gemm/panel_codes.inl.h"
#include "quire/cpu/generic/gemm/quads.inl.h"

/// True where the scale changes along the contraction, so that the inner product has to apply it.
inline bool has_block_scales(const Operand& o) { return o.spec.row().scope == Scope::block; }

/// Block scales of 16 lines and up to 16 blocks of an operand, as float32.
using ScaleSquare = float[kLaneGroup][kLaneGroup];

/// Interleaved bytes of up to `most` block scales of a whole tile of lines as [block][line].
inline void stage_scale_quads(const Operand& o, int64_t outer, int64_t first, int64_t most,
                              uint8_t (&bytes)[kLaneGroup][kLaneGroup]) {
  const int64_t all = block_count(o.spec, o.contraction), count = std::min(all - first, most);
  const uint8_t* quad = static_cast<const uint8_t*>(o.scale) + interleaved_offset(outer, first, all);
  for (int64_t b = 0; b < count; b += kQuadBytes)
    for (int64_t i = 0; i < kLaneGroup; i += kLanes, quad += kLanes * kQuadBytes) {
      const U32 blocks = load_quads(quad);
      for (int c = 0; c < kQuadBytes; ++c) store_low(&bytes[b + c][i], blocks >> (8 * c) & 0xFF);
    }
}

/// Bytes of block scales, [line][block] or [block][line] as they are stored; those outside the operand are zero.
/// Returns true if blocks come first.
inline bool stage_scale_bytes(const Operand& o, int64_t outer, int64_t first,
                              uint8_t (&bytes)[kLaneGroup][kLaneGroup]) {
  const int64_t all = block_count(o.spec, o.contraction);
  const int64_t lines = std::clamp<int64_t>(o.outer - outer, 0, kLaneGroup), count = std::min(all - first, kLaneGroup);
  const SideGrid grid{o.spec, o.direction, o.outer, all};
  const auto* from = static_cast<const uint8_t*>(o.scale);
  const bool blocks_lead = blocks_first(o.spec, o.direction);
  const bool runs = !o.spec.swizzled && !o.spec.interleaved;  // tiled layouts have no runs of scales to copy
  std::memset(bytes, 0, sizeof bytes);
  // Interleaved: four blocks of each line are neighbours, and whole groups of lines lie together.
  if (o.spec.interleaved && outer % kLaneGroup == 0) {
    if (lines > 0) stage_scale_quads(o, outer, first, kLaneGroup, bytes);
    return true;
  }
  // Otherwise line after line, or block after block: in one copy where they are a run.
  for (int64_t i = 0; i < (blocks_lead ? count : lines); ++i) {
    const int64_t size = blocks_lead ? lines : count;
    const auto at = [&](int64_t j) {
      return blocks_lead ? scale_index(grid, outer + j, first + i) : scale_index(grid, outer + i, first + j);
    };
    if (runs && size == kLaneGroup) {
      store_codes(bytes[i], load_codes(from + at(0)));
    } else if (runs && size > 0) {
      std::memcpy(bytes[i], from + at(0), static_cast<size_t>(size));
    } else {
      for (int64_t j = 0; j < size; ++j) bytes[i][j] = from[at(j)];
    }
  }
  return blocks_lead;
}

/// The values of scales whose bytes are lanes.
inline F32 decode_scale_lanes(ScaleKind kind, U32 code) {
  if (kind == ScaleKind::two_level) return decode_lanes<kBlockScaleFormat>(code);
  const U32 tiny = code == 0 ? U32{} + 0x00400000u : code << 23;  // 2^-127 is subnormal
  return reinterpret_cast<F32>(code == 255 ? U32{} + 0x7FC00000u : tiny);
}

/// Whether no scale in E4M3 is NaN.
inline bool all_numbers(const uint8_t (&bytes)[kLaneGroup][kLaneGroup]) {
  Codes most = {};
  for (const auto& line : bytes) most = larger(most, load_codes(line) & 0x7F);
  for (int64_t i = 0; i < kLaneGroup; ++i)
    if (most[i] == 0x7F) return false;
  return true;
}

/// The values of a square's bytes.
inline void decode_scale_bytes(ScaleKind kind, const uint8_t (&bytes)[kLaneGroup][kLaneGroup], ScaleSquare& out) {
  if (kind == ScaleKind::two_level && all_numbers(bytes)) {
    for (int64_t i = 0; i < kLaneGroup * kLaneGroup; i += kLanes)
      store(&out[0][0] + i, decode_finite<kBlockScaleFormat>(&bytes[0][0] + i));
    return;
  }
  for (int64_t i = 0; i < kLaneGroup * kLaneGroup; i += kLanes)
    store(&out[0][0] + i, decode_scale_lanes(kind, load_u8(&bytes[0][0] + i)));
}

/// Scales of 16 lines and `wanted` blocks from the first on: out[line][block] or, across, out[block][line]; 0 outside
/// the operand, but padding of interleaved ones.
template <bool Along>
void load_scale_square(const Operand& o, int64_t outer, int64_t first, int64_t wanted, ScaleSquare& out) {
  // Bytes: gather them as they are stored, transpose if they are wanted the other way, then decode the whole square.
  const ScaleKind kind = o.spec.row().scale;
  if (kind != ScaleKind::f32) {
    alignas(64) uint8_t bytes[kLaneGroup][kLaneGroup], transposed[kLaneGroup][kLaneGroup];
    const bool blocks_lead = stage_scale_bytes(o, outer, first, bytes);
    if (blocks_lead != Along) return decode_scale_bytes(kind, bytes, out);
    transpose_codes(&bytes[0][0], kLaneGroup, &transposed[0][0], kLaneGroup);
    return decode_scale_bytes(kind, transposed, out);
  }
  // Float32: no square of bytes to transpose, so each goes to its place.
  const int64_t all = block_count(o.spec, o.contraction);
  const SideGrid grid{o.spec, o.direction, o.outer, all};
  const int64_t lines = std::clamp<int64_t>(o.outer - outer, 0, kLaneGroup), count = std::min(all - first, wanted);
  const bool square = o.spec.square;
  const int64_t block = o.spec.row().block;
  std::memset(out, 0, sizeof out);
  for (int64_t b = 0; b < count; ++b)
    for (int64_t i = 0, run = 0; i < lines; i += run) {  // lines of a square share a scale, others are neighbours
      run = square ? std::min(lines - i, block - (outer + i) % block) : lines - i;
      const float* const from = static_cast<const float*>(o.scale) + scale_index(grid, outer + i, first + b);
      for (int64_t j = 0; j < run; ++j) (Along ? out[i + j][b] : out[b][i + j]) = from[square ? 0 : j];
    }
}

/// decode_scale_lanes() of byte c of each lane, where excess() is at most kMostExcess.
template <ScaleKind S>
inline F32 decode_ordinary_scales(U32 four, int c) {
  if constexpr (S == ScaleKind::e8m0) return float_of((c == 3 ? four >> 1 : four << (23 - 8 * c)) & 0x7F800000u);
  // The fields of a float32, whose exponent is then 120 too small.
  const I32 fields = (reinterpret_cast<I32>(four << (24 - 8 * c)) >> 4) & static_cast<int32_t>(0x87F00000);
  return reinterpret_cast<F32>(fields) * 0x1p120f;
}
/// Large for bytes that are no scale as others are: NaN, and of powers of two the least, which is subnormal.
template <ScaleKind S>
inline Bytes excess(U32 four) {
  const Bytes bytes = reinterpret_cast<Bytes>(four);
  if constexpr (S == ScaleKind::e8m0) return bytes - 1;
  return bytes + bytes;
}
constexpr uint8_t kMostExcess = 253;

/// Where scales of a tile's columns go, block by block.
struct ScaleColumns {
  float* first;
  int64_t stride;  ///< from a block to the next: the columns of a tile

  float* block(int64_t b) const { return first + b * stride; }
};

/// Groups of quads with the scales of 16 lines, four blocks in each; those of the next tile's lines are `ahead` of
/// them.
struct ScaleQuads {
  const uint8_t* bytes;
  int64_t groups, ahead;
};

/// Scales of whole groups of quads, which are those of four blocks each, every one for `repeat` blocks. kOnce: that
/// is 1.
template <bool kOnce, class Decode>
void decode_quads(const ScaleQuads& quads, int64_t repeat, ScaleColumns out, const Decode& decode) {
  const uint8_t* from = quads.bytes;
  const int64_t times = kOnce ? 1 : repeat;
  for (int64_t block = 0; block < quads.groups * kQuadBytes * times; block += kQuadBytes * times, from += kQuadGroup) {
    __builtin_prefetch(from + quads.ahead, 0, 2);
#pragma GCC unroll 4
    for (int64_t i = 0; i < kLaneGroup; i += kLanes) {
      F32 scales[kQuadBytes];
      decode(load_quads(from + i * kQuadBytes), scales);
#pragma GCC unroll 4
      for (int c = 0; c < kQuadBytes; ++c)
        for (int64_t r = 0; r < times; ++r) store(out.block(block + c * times + r) + i, scales[c]);
    }
  }
}
template <ScaleKind S>
void decode_quads_of(const ScaleQuads& quads, int64_t repeat, ScaleColumns out) {
  // Decode all by moving bits, and follow the largest excess.
  Bytes most{};
  const auto ordinary = [&](U32 four, F32(&scales)[kQuadBytes]) {
    most = larger(most, excess<S>(four));
#pragma GCC unroll 4
    for (int c = 0; c < kQuadBytes; ++c) scales[c] = decode_ordinary_scales<S>(four, c);
  };
  repeat == 1 ? decode_quads<true>(quads, repeat, out, ordinary) : decode_quads<false>(quads, repeat, out, ordinary);
  // Rare: a NaN or the least power of two. Decode all again, by the way that takes any byte.
  if (!any(reinterpret_cast<U32>(reinterpret_cast<Bytes>(most > kMostExcess)))) return;
  decode_quads<false>(quads, repeat, out, [](U32 four, F32(&scales)[kQuadBytes]) {
    for (int c = 0; c < kQuadBytes; ++c) scales[c] = decode_scale_lanes(S, four >> (8 * c) & 0xFF);
  });
}

/// decode_scales() across a whole tile of interleaved lines: their bytes are lanes already. `out` has room for
/// kPanelBlocks blocks; those of padding become 0. Shifts instead of divisions, which took as long as all the rest.
inline void decode_scale_quads(const Operand& o, int64_t outer, const KPanel& panel, ScaleColumns out) {
  const auto bits_of = [](int64_t power) { return std::bit_width(static_cast<uint64_t>(power - 1)); };
  // The operand's own blocks are powers of two, and so are those of a K-panel of more than one block.
  const int64_t own = o.spec.row().block, repeat = own >> bits_of(panel.block);
  const int64_t all = (o.contraction + own - 1) >> bits_of(own), first = panel.begin >> bits_of(own);
  const int64_t at = interleaved_offset(outer, first, all), group = own * kQuadBytes;
  const ScaleQuads quads{static_cast<const uint8_t*>(o.scale) + at, (panel.size + group - 1) >> bits_of(group),
                         interleaved_offset(outer + out.stride, first, all) - at};
  o.spec.row().scale == ScaleKind::e8m0 ? decode_quads_of<ScaleKind::e8m0>(quads, repeat, out)
                                        : decode_quads_of<ScaleKind::two_level>(quads, repeat, out);
  for (int64_t b = panel.blocks(); b < quads.groups * kQuadBytes * repeat; ++b)
    std::fill_n(out.block(b), kLaneGroup, 0.0f);
}

/// Block scales of a K-panel for 16 lines from `outer` on, repeated where the operand's own blocks are longer than the
/// K-panel's; 1 where it has none. Along lines: out[line * kPanelBlocks + block]; across: out[block * stride + line].
template <bool Along>
void decode_scales(const Operand& o, int64_t outer, const KPanel& panel, int64_t stride, float* out) {
  // No block scales: 1.
  const int64_t blocks = panel.blocks();
  if (!has_block_scales(o)) {
    for (int64_t i = 0; i < (Along ? kLaneGroup : blocks); ++i)
      std::fill_n(out + i * stride, Along ? blocks : kLaneGroup, 1.0f);
    return;
  }
  // Interleaved and across: the bytes are in the order of lanes.
  if (!Along && o.spec.interleaved && has_byte_scales(o.spec) && outer < o.outer)
    return decode_scale_quads(o, outer, panel, {out, stride});
  // Otherwise by a square of 16 lines, which repeats the operand's blocks as the K-panel needs.
  const int64_t own = block_length(o.spec, o.contraction), repeat = own / panel.block;
  alignas(64) ScaleSquare square;
  load_scale_square<Along>(o, outer, panel.begin / own, ceil_div(panel.size, own), square);
  for (int64_t i = 0; i < (Along ? kLaneGroup : blocks); ++i) {
    if (Along && repeat > 1) {
      for (int64_t b = 0; b < blocks; ++b) out[i * stride + b] = square[i][b / repeat];
    } else {
      for (int64_t j = 0; j < kLaneGroup; j += kLanes)
        store(out + i * stride + j, load(square[Along ? i : i / repeat] + j));
    }
  }
}

/// Blocks whose E8M0 scales may be multiplied into their codes.
constexpr int64_t kFoldedBlock = 32;

/// Whether scales are powers of two that may be multiplied into codes, where they are near enough to 1.
inline bool may_fold(const Operand& o) {
  return o.spec.row().scale == ScaleKind::e8m0 && o.spec.element_row().bits() == 8;
}

/// Which scale bytes are so near to 1 that no product of two such numbers is subnormal or overflows.
constexpr uint8_t kLeastPower = 127 - 50, kPowers = 2 * 50;

/// Scale bytes less the least that may be folded; those below it wrap around.
inline Codes above_least(const uint8_t* bytes) { return load_codes(bytes) - kLeastPower; }
inline bool folds(uint8_t byte) { return static_cast<uint8_t>(byte - kLeastPower) <= kPowers; }

/// Whether all of a run of scales may be folded.
inline bool run_folds(const uint8_t* bytes, int64_t count) {
  constexpr int64_t half = kLaneGroup / 2;
  if (count < half) return std::all_of(bytes, bytes + count, folds);
  uint8_t few[kLaneGroup];
  if (count < kLaneGroup) {
    std::memcpy(few, bytes, half);
    std::memcpy(few + half, bytes + count - half, half);
    bytes = few, count = kLaneGroup;
  }
  Codes most = above_least(bytes + count - kLaneGroup);
  for (int64_t b = 0; b + kLaneGroup < count; b += kLaneGroup) most = larger(most, above_least(bytes + b));
  const auto outside = std::bit_cast<std::array<uint64_t, 2>>(most > kPowers);
  return (outside[0] | outside[1]) == 0;
}

/// Whether the scales of a line can be multiplied into its codes.
inline bool can_fold(const Operand& o, int64_t outer) {
  static_assert(kFamilies[static_cast<size_t>(Family::mxfp8)].block == kFoldedBlock);
  const int64_t blocks = block_count(o.spec, o.contraction);
  const SideGrid grid{o.spec, o.direction, o.outer, blocks};
  const auto* scales = static_cast<const uint8_t*>(o.scale);
  if (!o.spec.swizzled && !o.spec.interleaved && !blocks_first(o.spec, o.direction))
    return run_folds(scales + scale_index(grid, outer, 0), blocks);
  bool all = true;
  for (int64_t b = 0; b < blocks; ++b) all &= folds(scales[scale_index(grid, outer, b)]);
  return all;
}

/// The same of 16 interleaved lines, which is quicker than one by one.
inline void can_fold_quads(const Operand& o, int64_t outer, bool (&all)[kLaneGroup]) {
  const int64_t blocks = block_count(o.spec, o.contraction), whole = blocks / kQuadBytes * kQuadBytes;
  const uint8_t* const quads = static_cast<const uint8_t*>(o.scale) + interleaved_offset(outer, 0, blocks);
  alignas(64) Codes most[kQuadBytes] = {};
  const uint8_t* at = quads;
  for (int64_t b = 0; b < whole; b += kQuadBytes)
    for (int i = 0; i < kQuadBytes; ++i, at += kLaneGroup) most[i] = larger(most[i], above_least(at));
  for (Codes& bytes : most) bytes = reinterpret_cast<Codes>(bytes > kPowers);
  for (int64_t i = 0; i < kLaneGroup; ++i) {
    uint32_t outside;
    std::memcpy(&outside, reinterpret_cast<const uint8_t*>(most) + i * kQuadBytes, sizeof outside);
    all[i] = outside == 0;
    for (int64_t b = whole; b < blocks; ++b) all[i] &= folds(quads[interleaved_offset(i, b, blocks)]);
  }
}

/// The same of 16 lines whose scales of one block are a run.
inline void can_fold_beside(const Operand& o, int64_t outer, bool (&all)[kLaneGroup]) {
  const SideGrid grid{o.spec, o.direction, o.outer, block_count(o.spec, o.contraction)};
  const auto* scales = static_cast<const uint8_t*>(o.scale) + scale_index(grid, outer, 0);
  Codes most = {};
  for (int64_t b = 0; b < grid.along; ++b) most = larger(most, above_least(scales + b * grid.outer));
  for (int64_t i = 0; i < kLaneGroup; ++i) all[i] = most[i] <= kPowers;
}

/// can_fold() of `count` lines from `outer` on.
inline void find_folded(const Operand& o, int64_t outer, int64_t count, bool* all) {
  const bool beside = !o.spec.swizzled && !o.spec.interleaved && blocks_first(o.spec, o.direction);
  for (int64_t i = 0; i < count; ++i) {
    const bool quads = o.spec.interleaved && (outer + i) % kLaneGroup == 0;
    if (!quads && !(beside && i + kLaneGroup <= count)) {
      all[i] = can_fold(o, outer + i);
      continue;
    }
    bool group[kLaneGroup];
    quads ? can_fold_quads(o, outer + i, group) : can_fold_beside(o, outer + i, group);
    std::copy_n(group, std::min(kLaneGroup, count - i), all + i);
    i += kLaneGroup - 1;
  }
}
