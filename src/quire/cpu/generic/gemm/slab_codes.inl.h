// Codes of an operand's lines, a slab of the contraction at a time, in the orders in which the product packs them.
// A line is one position of the outer dimension; `l` is a position along the contraction.
#pragma once

#include "quire/cpu/generic/elements/codes.inl.h"

/// Positions along the contraction that are decoded at a time: a panel of them stays in the first-level cache.
constexpr int64_t kSlab = 256;
/// Most block scales of one line in a slab.
constexpr int64_t kSlabBlocks = kSlab / 16;

/// A piece of the contraction.
struct Slab {
  int64_t begin = 0;
  int64_t size = 0;    ///< at most kSlab
  int64_t padded = 0;  ///< size rounded up to kGroup; the codes in between count as zero
  int64_t block = 0;   ///< positions that are summed before scales are applied

  int64_t blocks() const { return ceil_div(size, block); }
  /// size rounded up to what is packed at a time: at most kSlab, which is a multiple of every such step.
  int64_t rounded(int64_t step) const { return round_up(size, step); }
};

/// 16 lines of bytes, one every `stride`.
struct LineBytes {
  const uint8_t* data;
  int64_t stride;
};

inline const uint8_t* stored_codes(const Operand& o, int64_t outer, int64_t l) {
  const int64_t index = data_index({o.spec, o.direction, o.outer, o.contraction}, outer, l);
  return static_cast<const uint8_t*>(o.data) + (o.spec.packed() ? index / 2 : index);
}

/// Codes of up to 16 lines that are stored one position after the other: [kSlab][16].
inline void stage_across(const Operand& o, int64_t outer, const Slab& slab, uint8_t* codes) {
  const int64_t lines = std::clamp<int64_t>(o.outer - outer, 0, kGroup);
  if (lines < kGroup || slab.size < kSlab) std::memset(codes, 0, kGroup * kSlab);
  if (lines == 0) return;
  const uint8_t* from = stored_codes(o, outer, slab.begin);
  for (int64_t l = 0; l < slab.size; ++l, from += o.outer, codes += kGroup) {
    if (lines == kGroup) {
      store_codes(codes, load_codes(from));
    } else {
      std::memcpy(codes, from, static_cast<size_t>(lines));
    }
  }
}

// Interleaved operands: quads, four neighbouring bytes, of 16 lines after one another.

constexpr int64_t kQuadBytes = kInterleavedBytes, kQuadGroup = kQuadBytes * kGroup;
static_assert(kGroup == kInterleavedLines);

/// The quads of 16 lines from the position `begin` on.
inline const uint8_t* stored_quads(const Operand& o, int64_t outer, int64_t begin) {
  const int64_t in_byte = o.spec.packed() ? 2 : 1;
  return static_cast<const uint8_t*>(o.data) +
         interleaved_offset(outer, begin / in_byte, ceil_div(o.contraction, in_byte));
}

/// Bytes of a line from the position `begin` on, where they lie one after the other; in `copy` if they do not.
inline const uint8_t* line_bytes(const Operand& o, int64_t outer, const Slab& slab, uint8_t (&copy)[kSlab]) {
  if (!o.spec.interleaved) return stored_codes(o, outer, slab.begin);
  const uint8_t* from = stored_quads(o, outer, slab.begin);
  const int64_t bytes = ceil_div(slab.size, o.spec.packed() ? 2 : 1);
  for (int64_t byte = 0; byte < bytes; byte += kQuadBytes, from += kQuadGroup)
    std::memcpy(copy + byte, from, kQuadBytes);
  return copy;
}

/// Codes of up to 16 lines, a byte each, stored along lines: [16][kSlab].
inline void stage_along(const Operand& o, int64_t outer, const Slab& slab, uint8_t* codes) {
  const int64_t lines = std::clamp<int64_t>(o.outer - outer, 0, kGroup);
  if (lines < kGroup || slab.size < kSlab) std::memset(codes, 0, kGroup * kSlab);
  uint8_t copy[kSlab];
  for (int64_t i = 0; i < lines; ++i) {
    const uint8_t* from = line_bytes(o, outer + i, slab, copy);
    if (o.spec.packed()) {
      unpack_line(from, slab.size, codes + i * kSlab);
    } else {
      std::memcpy(codes + i * kSlab, from, static_cast<size_t>(slab.size));
    }
  }
}

/// Turns [kSlab][16] into [16][kSlab].
inline void turn_to_lines(const uint8_t* across, uint8_t* along) {
  for (int64_t l = 0; l < kSlab; l += kGroup) transpose_codes(across + l * kGroup, kGroup, along + l, kSlab);
}
/// Memory for the codes of 16 lines in both orders.
struct StagedCodes {
  alignas(64) uint8_t along[kGroup * kSlab], across[kGroup * kSlab];
};

/// Copies the quads of a slab, padded with zeros to [kSlab / 4][16][4].
inline void stage_quads(const Operand& o, int64_t outer, const Slab& slab, uint8_t* quads) {
  const int64_t in_byte = o.spec.packed() ? 2 : 1, bytes = ceil_div(slab.size, in_byte), whole = bytes / kQuadBytes;
  std::memset(quads, 0, kGroup * kSlab);
  if (outer >= o.outer) return;
  const uint8_t* from = stored_quads(o, outer, slab.begin);
  std::memcpy(quads, from, static_cast<size_t>(whole * kQuadGroup));
  if (whole * kQuadBytes == bytes && slab.size % in_byte == 0) return;
  for (int64_t byte = whole * kQuadGroup; bytes % kQuadBytes && byte < (whole + 1) * kQuadGroup; byte += kQuadBytes)
    std::memcpy(quads + byte, from + byte, static_cast<size_t>(bytes % kQuadBytes));
  if (slab.size % in_byte == 0) return;
  uint8_t* const last = quads + (bytes - 1) / kQuadBytes * kQuadGroup + (bytes - 1) % kQuadBytes;
  for (int64_t i = 0; i < kGroup; ++i) last[i * kQuadBytes] &= 0xF;
}

/// Turns quads of bytes of two codes into twice as many of one.
inline void unpack_quads(const uint8_t* packed, int64_t count, uint8_t* codes) {
  for (int64_t q = 0; q < count; ++q)
    for (int64_t byte = 0; byte < kQuadGroup; ++byte) {
      const int64_t at =
          q * 2 * kQuadGroup + byte % kQuadBytes / 2 * kQuadGroup + byte / kQuadBytes * kQuadBytes + byte % 2 * 2;
      codes[at] = packed[q * kQuadGroup + byte] & 0xF;
      codes[at + 1] = packed[q * kQuadGroup + byte] >> 4;
    }
}

/// Whether the slab is whole and all 16 lines from `outer` on are there, those of padding too.
inline bool is_whole(const Operand& o, int64_t outer, const Slab& slab) {
  return slab.size == kSlab && (o.spec.interleaved ? outer < o.outer : outer + kGroup <= o.outer);
}

/// The codes of 16 interleaved lines, a byte each: [kSlab / 4][16][4]. In place where they are stored so.
inline const uint8_t* code_quads(const Operand& o, int64_t outer, const Slab& slab, StagedCodes& staged) {
  if (!o.spec.packed() && is_whole(o, outer, slab)) return stored_quads(o, outer, slab.begin);
  stage_quads(o, outer, slab, staged.across);
  if (!o.spec.packed()) return staged.across;
  unpack_quads(staged.across, kSlab / 2 / kQuadBytes, staged.along);
  return staged.along;
}

/// The same of 4-bit codes, two in a byte: [kSlab / 8][16][4].
inline const uint8_t* packed_quads(const Operand& o, int64_t outer, const Slab& slab, StagedCodes& staged) {
  if (is_whole(o, outer, slab)) return stored_quads(o, outer, slab.begin);
  stage_quads(o, outer, slab, staged.across);
  return staged.across;
}

/// Codes of 16 lines from `outer` on, a byte each along lines; what lies outside the operand or the slab is zero. In
/// place where the operand stores them so.
inline LineBytes codes_along(const Operand& o, int64_t outer, const Slab& slab, StagedCodes& staged) {
  if (blocks_first(o.spec, o.direction)) {
    stage_across(o, outer, slab, staged.across);
    turn_to_lines(staged.across, staged.along);
    return {staged.along, kSlab};
  }
  if (!o.spec.packed() && !o.spec.interleaved && is_whole(o, outer, slab))
    return {stored_codes(o, outer, slab.begin), o.contraction};
  stage_along(o, outer, slab, staged.along);
  return {staged.along, kSlab};
}

/// The same of an operand of 4-bit codes, two in a byte: kSlab / 2 bytes a line.
inline LineBytes packed_along(const Operand& o, int64_t outer, const Slab& slab, StagedCodes& staged) {
  if (!o.spec.interleaved && is_whole(o, outer, slab))
    return {stored_codes(o, outer, slab.begin), ceil_div(o.contraction, 2)};
  const int64_t lines = std::clamp<int64_t>(o.outer - outer, 0, kGroup), bytes = ceil_div(slab.size, 2);
  uint8_t copy[kSlab];
  std::memset(staged.along, 0, kGroup * kSlab / 2);
  for (int64_t i = 0; i < lines; ++i) {
    uint8_t* to = staged.along + i * kSlab / 2;
    std::memcpy(to, line_bytes(o, outer + i, slab, copy), static_cast<size_t>(bytes));
    if (slab.size % 2) to[bytes - 1] &= 0xF;
  }
  return {staged.along, kSlab / 2};
}
