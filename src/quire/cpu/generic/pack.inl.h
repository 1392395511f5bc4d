// Codes and block scales of an operand's lines, decoded to f32 in the order in which the product reads them.
// A line is one position of the outer dimension; `l` is a position along the contraction.

/// Columns of a register tile.
constexpr int kTileCols = kTileVectors * kLanes;
static_assert(kTileCols % kGroup == 0, "a register tile spans whole groups of columns");
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
};

/// Copies the codes of 16 lines into [16][kSlab], or where blocks come first [kSlab][16]: the order in which they are
/// stored. What lies outside the operand is zero.
inline void stage_codes(const Operand& o, int64_t outer, const Slab& slab, uint8_t* codes) {
  const auto* data = static_cast<const uint8_t*>(o.data);
  const int64_t lines = std::clamp<int64_t>(o.outer - outer, 0, kGroup);
  if (lines < kGroup || slab.size < slab.padded) std::memset(codes, 0, kGroup * kSlab);
  const auto index = [&](int64_t line, int64_t l) {
    return data_index({o.spec, o.direction, o.outer, o.contraction}, outer + line, slab.begin + l);
  };
  if (blocks_first(o.spec, o.direction)) {
    if (lines == 0) return;
    const uint8_t* from = data + index(0, 0);
    for (int64_t l = 0; l < slab.size; ++l, from += o.outer, codes += kGroup) {
      if (lines == kGroup) {
        store_codes(codes, load_codes(from));
      } else {
        std::memcpy(codes, from, static_cast<size_t>(lines));
      }
    }
    return;
  }
  for (int64_t i = 0; i < lines; ++i) {
    if (o.spec.packed()) {
      unpack_line(data + index(i, 0) / 2, slab.size, codes + i * kSlab);
    } else {
      std::memcpy(codes + i * kSlab, data + index(i, 0), static_cast<size_t>(slab.size));
    }
  }
}

/// Decodes 16 lines of a slab from `outer` on. Along lines: out[line * kSlab + l]; across: out[l * 16 + line].
template <bool Along>
void decode_group(const Operand& o, int64_t outer, const Slab& slab, float* out) {
  alignas(64) uint8_t staged[kGroup * kSlab], turned[kGroup * kSlab];
  stage_codes(o, outer, slab, staged);
  const bool across = blocks_first(o.spec, o.direction);
  if (Along == across) {
    const int64_t in_step = across ? kGroup * kGroup : kGroup, in_stride = across ? kGroup : kSlab;
    const int64_t out_step = Along ? kGroup : kGroup * kGroup, out_stride = Along ? kSlab : kGroup;
    for (int64_t i = 0; i < slab.padded / kGroup; ++i)
      transpose_codes(staged + i * in_step, in_stride, turned + i * out_step, out_stride);
  }
  const uint8_t* codes = Along == across ? turned : staged;
  if (!Along) return decode_codes(o.spec.element, codes, slab.padded * kGroup, out);
  for (int64_t i = 0; i < kGroup; ++i) decode_codes(o.spec.element, codes + i * kSlab, slab.padded, out + i * kSlab);
}

/// True where the scale changes along the contraction, so that the inner product has to apply it.
inline bool has_block_scales(const Operand& o) { return o.spec.row().scope == Scope::block; }

constexpr auto kE4m3Values = [] {
  std::array<float, 256> values{};
  for (int code = 0; code < 256; ++code) values[static_cast<size_t>(code)] = quire::decode(Format::e4m3, code);
  return values;
}();

template <ScaleKind Kind>
float scale_value(const void* scales, int64_t index) {
  if constexpr (Kind == ScaleKind::f32) return static_cast<const float*>(scales)[index];
  const uint8_t byte = static_cast<const uint8_t*>(scales)[index];
  return Kind == ScaleKind::e8m0 ? e8m0_value(byte) : kE4m3Values[byte];
}

/// Block scales of the blocks of a slab for lines from `outer` on, repeated where the operand's own blocks are longer
/// than the slab's. Along lines: out[line * kSlabBlocks + block]; across: out[block * kTileCols + line].
template <bool Along, ScaleKind Kind>
void decode_scales_of(const Operand& o, int64_t outer, const Slab& slab, int64_t lines, float* out) {
  const int64_t count = block_count(o.spec, o.contraction), own = block_length(o.spec, o.contraction);
  const int64_t first = slab.begin / own, repeat = own / slab.block, blocks = slab.blocks();
  const auto index = [&](int64_t line, int64_t block) {
    return scale_index({o.spec, o.direction, o.outer, count}, outer + line, block);
  };
  // Tiled layouts aside, the scales of a line are evenly spaced.
  const bool tiled = o.spec.swizzled;
  const int64_t step = index(0, 1) - index(0, 0);
  for (int64_t i = 0; i < lines; ++i) {
    const int64_t base = index(i, first);
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t further = repeat == 1 ? b : b / repeat;
      const int64_t at = tiled ? index(i, first + further) : base + further * step;
      out[Along ? i * kSlabBlocks + b : b * kTileCols + i] = scale_value<Kind>(o.scale, at);
    }
  }
}

/// The same for any operand: 1 where it has no block scales, 0 outside of it.
template <bool Along>
void decode_scales(const Operand& o, int64_t outer, const Slab& slab, int64_t lines, float* out) {
  const int64_t inside = std::clamp<int64_t>(o.outer - outer, 0, lines);
  if (inside < lines || !has_block_scales(o))
    std::fill_n(out, Along ? lines * kSlabBlocks : slab.blocks() * lines, has_block_scales(o) ? 0.0f : 1.0f);
  if (!has_block_scales(o)) return;
  switch (o.spec.row().scale) {
    case ScaleKind::f32:
      return decode_scales_of<Along, ScaleKind::f32>(o, outer, slab, inside, out);
    case ScaleKind::e8m0:
      return decode_scales_of<Along, ScaleKind::e8m0>(o, outer, slab, inside, out);
    case ScaleKind::e4m3:
      return decode_scales_of<Along, ScaleKind::e4m3>(o, outer, slab, inside, out);
  }
}
