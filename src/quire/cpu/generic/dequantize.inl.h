// Dequantization of one direction: codes of a tile's lines times one value per block.

/// Sizes of the direction that is decoded.
struct Extent {
  int64_t outer, contraction, blocks, block;
};

Extent extent_of(const DequantizeProblem& p) {
  const bool rowwise = p.direction == Direction::rowwise;
  const int64_t outer = rowwise ? p.rows : p.cols;
  const int64_t contraction = rowwise ? p.cols : columnwise_tokens(p.spec, p.rows);
  const int64_t block = p.spec.row().block == 0 ? kTile : p.spec.row().block;
  return {outer, contraction, block_count(p.spec, contraction), block};
}

/// What multiplies the codes of one block of one line.
[[gnu::flatten]] inline float block_value(const DequantizeProblem& p, const Extent& e, int64_t line, int64_t block) {
  const int64_t at = scale_index({p.spec, p.direction, e.outer, e.blocks}, line, block);
  const uint8_t* bytes = static_cast<const uint8_t*>(p.scale);
  switch (p.spec.row().scale) {
    case ScaleKind::f32:
      return static_cast<const float*>(p.scale)[at];
    case ScaleKind::e8m0:
      return e8m0_value(bytes[at]);
    case ScaleKind::e4m3:
      break;
  }
  return nvfp4_value(decode_fast<Format::e4m3>(bytes[at]), p.amax[amax_index(p.spec, line)], p.spec.e4m3_max());
}

/// Codes of a tile's lines, one per byte, zero up to kTile of them. Rows of the tile are the lines, its columns run
/// along the contraction.
inline void load_tile_codes(const DequantizeProblem& p, const Extent& e, const Tile& tile,
                            uint8_t (&codes)[kTile][kTile]) {
  const uint8_t* data = static_cast<const uint8_t*>(p.data);
  const auto at = [&](int64_t i, int64_t j) {
    return data_index({p.spec, p.direction, e.outer, e.contraction}, tile.row + i, tile.col + j);
  };
  if (blocks_first(p.spec, p.direction)) {
    alignas(64) uint8_t turned[kTile][kTile] = {};
    for (int64_t j = 0; j < tile.cols; ++j) std::memcpy(turned[j], data + at(0, j), static_cast<size_t>(tile.rows));
    return turn_codes(turned, kTile, tile.rows, codes);
  }
  for (int64_t i = 0; i < tile.rows; ++i) {
    if (p.spec.packed())
      unpack_line(data + at(i, 0) / 2, tile.cols, codes[i]);
    else
      std::memcpy(codes[i], data + at(i, 0), static_cast<size_t>(tile.cols));
    std::fill(codes[i] + tile.cols, codes[i] + kTile, uint8_t{0});
  }
}

/// values[j] *= the scale of its block, for a line of a tile.
inline void scale_line(const DequantizeProblem& p, const Extent& e, int64_t line, const Tile& tile, float* values) {
  for (int64_t first = 0; first < tile.cols; first += e.block) {
    const int64_t block = p.spec.row().block == 0 ? 0 : (tile.col + first) / e.block;
    const F32 scale = broadcast(block_value(p, e, line, block));
    for (int64_t j = first; j < first + e.block; j += kLanes) store(values + j, load(values + j) * scale);
  }
}

void dequantize_tile(const DequantizeProblem& p, const Extent& e, const Tile& tile) {
  alignas(64) uint8_t codes[kTile][kTile];
  alignas(64) float values[kTile];
  load_tile_codes(p, e, tile, codes);
  for (int64_t i = 0; i < tile.rows; ++i) {
    decode_codes(p.spec.element, codes[i], kTile, values);
    scale_line(p, e, tile.row + i, tile, values);
    const int64_t at = (tile.row + i) * p.out.row_stride + tile.col;
    write_line(p.out.dtype, values, tile.cols, static_cast<char*>(p.out.data) + at * size_of(p.out.dtype));
  }
}

void dequantize(const DequantizeProblem& p) {
  const Extent e = extent_of(p);
  const Matrix lines{nullptr, DType::u8, e.outer, e.contraction, 0};
  const int64_t rows = blocks_first(p.spec, p.direction) ? kTile : kGroup;
  const int64_t tiles = ceil_div(e.outer, rows) * ceil_div(e.contraction, kTile);
  parallel_for(tiles, kGrain / (rows * kTile), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) dequantize_tile(p, e, tile_at(lines, rows, kTile, t));
  });
}
