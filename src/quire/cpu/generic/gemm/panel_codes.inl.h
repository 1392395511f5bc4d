// Codes of an operand's lines, a K-panel of the contraction at a time, in the orders in which the product packs them.
// A line is one position of the outer dimension; `l` is a position along the contraction.
#pragma once

#include "quire/cpu/generic/elements/codes.inl.h"
#include "quire/cpu/generic/elements/transpose.inl.h"

/// Positions along the contraction that are decoded at a time: a panel of them stays in the first-level cache.
constexpr int64_t kPanelDepth = 256;
/// Most block scales of one line in a K-panel.
constexpr int64_t kPanelBlocks = kPanelDepth / 16;

/// A piece of the contraction.
struct KPanel {
  int64_t begin = 0;
  int64_t size = 0;    ///< at most kPanelDepth
  int64_t padded = 0;  ///< size rounded up to kLaneGroup; the codes in between count as zero
  int64_t block = 0;   ///< positions that are summed before scales are applied

  int64_t blocks() const { return ceil_div(size, block); }
  /// size rounded up to what is packed at a time: at most kPanelDepth, which is a multiple of every such step.
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

/// Codes of up to 16 lines that are stored one position after the other: [kPanelDepth][16].
inline void stage_across(const Operand& o, int64_t outer, const KPanel& panel, uint8_t* codes) {
  const int64_t lines = std::clamp<int64_t>(o.outer - outer, 0, kLaneGroup);
  if (lines < kLaneGroup || panel.size < kPanelDepth) std::memset(codes, 0, kLaneGroup * kPanelDepth);
  if (lines == 0) return;
  const uint8_t* from = stored_codes(o, outer, panel.begin);
  for (int64_t l = 0; l < panel.size; ++l, from += o.outer, codes += kLaneGroup) {
    if (lines == kLaneGroup) {
      store_codes(codes, load_codes(from));
    } else {
      std::memcpy(codes, from, static_cast<size_t>(lines));
    }
  }
}

// Interleaved operands: quads, four neighbouring bytes, of 16 lines after one another.

constexpr int64_t kQuadBytes = kInterleavedBytes, kQuadGroup = kQuadBytes * kLaneGroup;
static_assert(kLaneGroup == kInterleavedLines);

/// The quads of 16 lines from the position `begin` on.
inline const uint8_t* stored_quads(const Operand& o, int64_t outer, int64_t begin) {
  const int64_t in_byte = o.spec.packed() ? 2 : 1;
  return static_cast<const uint8_t*>(o.data) +
         interleaved_offset(outer, begin / in_byte, ceil_div(o.contraction, in_byte));
}

/// Bytes of a line from the position `begin` on, where they lie one after the other; in `copy` if they do not.
inline const uint8_t* line_bytes(const Operand& o, int64_t outer, const KPanel& panel, uint8_t (&copy)[kPanelDepth]) {
  if (!o.spec.interleaved) return stored_codes(o, outer, panel.begin);
  const uint8_t* from = stored_quads(o, outer, panel.begin);
  const int64_t bytes = ceil_div(panel.size, o.spec.packed() ? 2 : 1);
  for (int64_t byte = 0; byte < bytes; byte += kQuadBytes, from += kQuadGroup)
    std::memcpy(copy + byte, from, kQuadBytes);
  return copy;
}

/// Codes of up to 16 lines, a byte each, stored along lines: [16][kPanelDepth].
inline void stage_along(const Operand& o, int64_t outer, const KPanel& panel, uint8_t* codes) {
  const int64_t lines = std::clamp<int64_t>(o.outer - outer, 0, kLaneGroup);
  if (lines < kLaneGroup || panel.size < kPanelDepth) std::memset(codes, 0, kLaneGroup * kPanelDepth);
  uint8_t copy[kPanelDepth];
  for (int64_t i = 0; i < lines; ++i) {
    const uint8_t* from = line_bytes(o, outer + i, panel, copy);
    if (o.spec.packed()) {
      unpack_line(from, panel.size, codes + i * kPanelDepth);
    } else {
      std::memcpy(codes + i * kPanelDepth, from, static_cast<size_t>(panel.size));
    }
  }
}

/// Turns [kPanelDepth][16] into [16][kPanelDepth].
inline void transpose_to_lines(const uint8_t* across, uint8_t* along) {
  for (int64_t l = 0; l < kPanelDepth; l += kLaneGroup)
    transpose_codes(across + l * kLaneGroup, kLaneGroup, along + l, kPanelDepth);
}
/// Memory for the codes of 16 lines in both orders.
struct StagedCodes {
  alignas(64) uint8_t along[kLaneGroup * kPanelDepth], across[kLaneGroup * kPanelDepth];
};

/// Copies the quads of a K-panel, padded with zeros to [kPanelDepth / 4][16][4].
inline void stage_quads(const Operand& o, int64_t outer, const KPanel& panel, uint8_t* quads) {
  const int64_t in_byte = o.spec.packed() ? 2 : 1, bytes = ceil_div(panel.size, in_byte), whole = bytes / kQuadBytes;
  std::memset(quads, 0, kLaneGroup * kPanelDepth);
  if (outer >= o.outer) return;
  const uint8_t* from = stored_quads(o, outer, panel.begin);
  std::memcpy(quads, from, static_cast<size_t>(whole * kQuadGroup));
  if (whole * kQuadBytes == bytes && panel.size % in_byte == 0) return;
  for (int64_t byte = whole * kQuadGroup; bytes % kQuadBytes && byte < (whole + 1) * kQuadGroup; byte += kQuadBytes)
    std::memcpy(quads + byte, from + byte, static_cast<size_t>(bytes % kQuadBytes));
  if (panel.size % in_byte == 0) return;
  uint8_t* const last = quads + (bytes - 1) / kQuadBytes * kQuadGroup + (bytes - 1) % kQuadBytes;
  for (int64_t i = 0; i < kLaneGroup; ++i) last[i * kQuadBytes] &= 0xF;
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

/// Whether the K-panel is whole and all 16 lines from `outer` on are there, those of padding too.
inline bool is_whole(const Operand& o, int64_t outer, const KPanel& panel) {
  return panel.size == kPanelDepth && (o.spec.interleaved ? outer < o.outer : outer + kLaneGroup <= o.outer);
}

/// The codes of 16 interleaved lines, a byte each: [kPanelDepth / 4][16][4]. In place where they are stored so.
inline const uint8_t* code_quads(const Operand& o, int64_t outer, const KPanel& panel, StagedCodes& staged) {
  if (!o.spec.packed() && is_whole(o, outer, panel)) return stored_quads(o, outer, panel.begin);
  stage_quads(o, outer, panel, staged.across);
  if (!o.spec.packed()) return staged.across;
  unpack_quads(staged.across, kPanelDepth / 2 / kQuadBytes, staged.along);
  return staged.along;
}

/// The same of 4-bit codes, two in a byte: [kPanelDepth / 8][16][4].
inline const uint8_t* packed_quads(const Operand& o, int64_t outer, const KPanel& panel, StagedCodes& staged) {
  if (is_whole(o, outer, panel)) return stored_quads(o, outer, panel.begin);
  stage_quads(o, outer, panel, staged.across);
  return staged.across;
}

/// Codes of 16 lines from `outer` on, a byte each along lines; what lies outside the operand or the K-panel is zero. In
/// place where the operand stores them so.
inline LineBytes codes_along(const Operand& o, int64_t outer, const KPanel& panel, StagedCodes& staged) {
  if (blocks_first(o.spec, o.direction)) {
    stage_across(o, outer, panel, staged.across);
    transpose_to_lines(staged.across, staged.along);
    return {staged.along, kPanelDepth};
  }
  if (!o.spec.packed() && !o.spec.interleaved && is_whole(o, outer, panel))
    return {stored_codes(o, outer, panel.begin), o.contraction};
  stage_along(o, outer, panel, staged.along);
  return {staged.along, kPanelDepth};
}

/// The same of an operand of 4-bit codes, two in a byte: kPanelDepth / 2 bytes a line.
inline LineBytes packed_along(const Operand& o, int64_t outer, const KPanel& panel, StagedCodes& staged) {
  if (!o.spec.interleaved && is_whole(o, outer, panel))
    return {stored_codes(o, outer, panel.begin), ceil_div(o.contraction, 2)};
  const int64_t lines = std::clamp<int64_t>(o.outer - outer, 0, kLaneGroup), bytes = ceil_div(panel.size, 2);
  uint8_t copy[kPanelDepth];
  std::memset(staged.along, 0, kLaneGroup * kPanelDepth / 2);
  for (int64_t i = 0; i < lines; ++i) {
    uint8_t* to = staged.along + i * kPanelDepth / 2;
    std::memcpy(to, line_bytes(o, outer + i, panel, copy), static_cast<size_t>(bytes));
    if (panel.size % 2) to[bytes - 1] &= 0xF;
  }
  return {staged.along, kPanelDepth / 2};
}
