// Codes and block scales of an operand's lines, in the order in which the product reads them.
// A line is one position of the outer dimension; `l` is a position along the contraction.

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

/// Codes of up to 16 lines, a byte each, stored along lines: [16][kSlab].
inline void stage_along(const Operand& o, int64_t outer, const Slab& slab, uint8_t* codes) {
  const int64_t lines = std::clamp<int64_t>(o.outer - outer, 0, kGroup);
  if (lines < kGroup || slab.size < kSlab) std::memset(codes, 0, kGroup * kSlab);
  for (int64_t i = 0; i < lines; ++i) {
    const uint8_t* from = stored_codes(o, outer + i, slab.begin);
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

/// Codes of 16 lines from `outer` on, a byte each along lines; what lies outside the operand or the slab is zero. In
/// place where the operand stores them so.
inline LineBytes codes_along(const Operand& o, int64_t outer, const Slab& slab, StagedCodes& staged) {
  if (blocks_first(o.spec, o.direction)) {
    stage_across(o, outer, slab, staged.across);
    turn_to_lines(staged.across, staged.along);
    return {staged.along, kSlab};
  }
  if (!o.spec.packed() && slab.size == kSlab && outer + kGroup <= o.outer)
    return {stored_codes(o, outer, slab.begin), o.contraction};
  stage_along(o, outer, slab, staged.along);
  return {staged.along, kSlab};
}

/// The same of an operand of 4-bit codes, two in a byte: kSlab / 2 bytes a line.
inline LineBytes packed_along(const Operand& o, int64_t outer, const Slab& slab, StagedCodes& staged) {
  const int64_t lines = std::clamp<int64_t>(o.outer - outer, 0, kGroup), bytes = ceil_div(slab.size, 2);
  if (slab.size == kSlab && lines == kGroup) return {stored_codes(o, outer, slab.begin), ceil_div(o.contraction, 2)};
  std::memset(staged.along, 0, kGroup * kSlab / 2);
  for (int64_t i = 0; i < lines; ++i) {
    uint8_t* to = staged.along + i * kSlab / 2;
    std::memcpy(to, stored_codes(o, outer + i, slab.begin), static_cast<size_t>(bytes));
    if (slab.size % 2) to[bytes - 1] &= 0xF;
  }
  return {staged.along, kSlab / 2};
}

/// True where the scale changes along the contraction, so that the inner product has to apply it.
inline bool has_block_scales(const Operand& o) { return o.spec.row().scope == Scope::block; }

/// Block scales of 16 lines and up to 16 blocks of an operand, as float32.
using ScaleSquare = float[kGroup][kGroup];

/// Bytes of block scales, [line][block] or [block][line] as they are stored; those outside the operand are zero.
/// Returns true if blocks come first.
inline bool stage_scale_bytes(const Operand& o, int64_t outer, int64_t first, uint8_t (&bytes)[kGroup][kGroup]) {
  const int64_t all = block_count(o.spec, o.contraction);
  const int64_t lines = std::clamp<int64_t>(o.outer - outer, 0, kGroup), count = std::min(all - first, kGroup);
  const SideGrid grid{o.spec, o.direction, o.outer, all};
  const auto* from = static_cast<const uint8_t*>(o.scale);
  const bool blocks_lead = blocks_first(o.spec, o.direction);
  const bool runs = !o.spec.swizzled;  // tiled layouts have no runs of scales to copy
  std::memset(bytes, 0, sizeof bytes);
  for (int64_t i = 0; i < (blocks_lead ? count : lines); ++i) {
    const int64_t size = blocks_lead ? lines : count;
    const auto at = [&](int64_t j) {
      return blocks_lead ? scale_index(grid, outer + j, first + i) : scale_index(grid, outer + i, first + j);
    };
    if (runs && size == kGroup) {
      store_codes(bytes[i], load_codes(from + at(0)));
    } else if (runs && size > 0) {
      std::memcpy(bytes[i], from + at(0), static_cast<size_t>(size));
    } else {
      for (int64_t j = 0; j < size; ++j) bytes[i][j] = from[at(j)];
    }
  }
  return blocks_lead;
}

/// The values of a square's bytes.
inline void decode_scale_bytes(ScaleKind kind, const uint8_t (&bytes)[kGroup][kGroup], ScaleSquare& out) {
  for (int64_t i = 0; i < kGroup * kGroup; i += kLanes) {
    const U32 code = load_u8(&bytes[0][0] + i);
    if (kind == ScaleKind::e4m3) {
      store(&out[0][0] + i, decode_lanes<Format::e4m3>(code));
    } else {
      const U32 tiny = code == 0 ? U32{} + 0x00400000u : code << 23;  // 2^-127 is subnormal
      store(&out[0][0] + i, reinterpret_cast<F32>(code == 255 ? U32{} + 0x7FC00000u : tiny));
    }
  }
}

/// Scales of 16 lines and the blocks [first, first + 16): out[line][block] or, across, out[block][line]; 0 outside.
template <bool Along>
void load_scale_square(const Operand& o, int64_t outer, int64_t first, ScaleSquare& out) {
  const ScaleKind kind = o.spec.row().scale;
  if (kind != ScaleKind::f32) {
    alignas(64) uint8_t bytes[kGroup][kGroup], turned[kGroup][kGroup];
    const bool blocks_lead = stage_scale_bytes(o, outer, first, bytes);
    if (blocks_lead != Along) return decode_scale_bytes(kind, bytes, out);
    transpose_codes(&bytes[0][0], kGroup, &turned[0][0], kGroup);
    return decode_scale_bytes(kind, turned, out);
  }
  const int64_t all = block_count(o.spec, o.contraction);
  const SideGrid grid{o.spec, o.direction, o.outer, all};
  const int64_t lines = std::clamp<int64_t>(o.outer - outer, 0, kGroup), count = std::min(all - first, kGroup);
  std::memset(out, 0, sizeof out);
  for (int64_t i = 0; i < lines; ++i)
    for (int64_t b = 0; b < count; ++b)
      (Along ? out[i][b] : out[b][i]) = static_cast<const float*>(o.scale)[scale_index(grid, outer + i, first + b)];
}

/// Block scales of a slab for 16 lines from `outer` on, repeated where the operand's own blocks are longer than the
/// slab's; 1 where it has none. Along lines: out[line * kSlabBlocks + block]; across: out[block * stride + line].
template <bool Along>
void decode_scales(const Operand& o, int64_t outer, const Slab& slab, int64_t stride, float* out) {
  const int64_t blocks = slab.blocks();
  if (!has_block_scales(o)) {
    for (int64_t i = 0; i < (Along ? kGroup : blocks); ++i)
      std::fill_n(out + i * stride, Along ? blocks : kGroup, 1.0f);
    return;
  }
  const int64_t own = block_length(o.spec, o.contraction), repeat = own / slab.block;
  alignas(64) ScaleSquare square;
  load_scale_square<Along>(o, outer, slab.begin / own, square);
  for (int64_t i = 0; i < (Along ? kGroup : blocks); ++i) {
    if (Along && repeat > 1) {
      for (int64_t b = 0; b < blocks; ++b) out[i * stride + b] = square[i][b / repeat];
    } else {
      for (int64_t j = 0; j < kGroup; j += kLanes)
        store(out + i * stride + j, load(square[Along ? i : i / repeat] + j));
    }
  }
}

/// Blocks whose E8M0 scales may be multiplied into their codes.
constexpr int64_t kFoldedBlock = 32;

/// Whether the scales of a line can be multiplied into its codes: they are powers of two so near 1 that no product of
/// two such numbers is subnormal or overflows.
inline bool can_fold(const Operand& o, int64_t outer) {
  if (o.spec.row().scale != ScaleKind::e8m0 || o.spec.packed()) return false;
  static_assert(kFamilies[static_cast<size_t>(Family::mxfp8)].block == kFoldedBlock);
  constexpr int least = 127 - 50, most = 127 + 50;
  const int64_t blocks = block_count(o.spec, o.contraction);
  const SideGrid grid{o.spec, o.direction, o.outer, blocks};
  const auto* scales = static_cast<const uint8_t*>(o.scale);
  uint8_t low = 255, high = 0;
  const auto look_at = [&](uint8_t byte) { low = std::min(low, byte), high = std::max(high, byte); };
  if (o.spec.swizzled || blocks_first(o.spec, o.direction)) {
    for (int64_t b = 0; b < blocks; ++b) look_at(scales[scale_index(grid, outer, b)]);
  } else {
    const uint8_t* const line = scales + scale_index(grid, outer, 0);
    for (int64_t b = 0; b < blocks; ++b) look_at(line[b]);
  }
  return low >= least && high <= most;
}
