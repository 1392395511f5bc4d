// The micro-tile of the product.
//
// Panels are made of lanes of four bytes: one float32, two bfloat16 or four int8, neighbours along the contraction,
// held in memory of floats. Rows keep their lanes one after the other; columns keep a lane of 16 columns after the
// other. A micro-kernel is a class that says how codes become lanes and how lanes are multiplied:
//   kPanelLanes       lanes of one line of a K-panel
//   kRowLanes         floats from one packed row to the next
//   kPackedRows       floats of packed rows that are kept at a time: few rows are packed once for all columns
//   Session           what a thread needs while it multiplies outputs of so many rows
//   kRowStep          its kernels have a multiple of so many rows
//   kRows, kVectors   shape of the micro-tile: rows, and vectors of columns
//   kMaxBlock         most positions that are summed before anything else
//   kUnit             what a product of 1 means: a power of two
//   kFolding          which scales are multiplied into the codes
//   kReadsCodes       whether columns may be decoded as they are multiplied
//   kReadStep         positions that they are decoded at a time
//   kKeeping          when they are packed then, for tiles that follow
//   reads             the specs whose columns may be decoded so
//   decodes_slowly    whether a tall tile pays, of lanes that have one
//   with_codes        calls its argument with such columns and returns true; or false if what they were read as is
//                     wrong
//   pack_rows, pack_columns   16 lines of a K-panel to lanes
//   multiply_rows     a micro-tile of so many rows over a K-panel
#pragma once

#include "quire/cpu/generic/elements/codes.inl.h"
#include "quire/cpu/generic/gemm/panel_codes.inl.h"
#include "quire/cpu/generic/gemm/quads.inl.h"

/// Most positions along the contraction whose products are summed before anything else (numerics.md 0.20).
constexpr int64_t kLongestBlock = 128;

/// Most rows of a micro-tile, and its vectors of columns.
struct TileShape {
  int rows, vectors;
};
constexpr TileShape kWideTile{kTileRows, kTileVectors};
/// Of up to 16 rows: columns are decoded for all of them at once. For 32 registers.
constexpr TileShape kTallTile{16, 1};

/// When columns that are decoded as they are multiplied are packed too: where other tiles follow; always, because that
/// is how they are multiplied; or never, because there is one tile.
enum class Keeping : uint8_t { where_needed, always, never };

struct NoSession {
  explicit NoSession(int64_t /*rows*/) {}
};

/// What lanes have in common that are multiplied in registers, any number of rows at a time.
struct RegisterMicroKernel {
  using Session = NoSession;
  static constexpr int64_t kPackedRows = int64_t{1} << 16;
  static constexpr int kRowStep = 1;
  static constexpr bool kReadsCodes = true;
  static constexpr Keeping kKeeping = Keeping::where_needed;
  static constexpr int64_t kReadStep = kLaneGroup;
};

/// Scales that lanes have room for: none, those that are powers of two near 1 (may_fold()), or all.
enum class Folding : uint8_t { none, powers, all };

/// Packed operands of one micro-tile over one K-panel.
struct MicroTile {
  int64_t rows;          ///< that there are
  const float* a;        ///< [rows, whole kernels][MicroKernel::kRowLanes]
  const float* a_scale;  ///< [rows][kPanelBlocks]
  const float* b_scale;  ///< [blocks][columns]
  float* sum;            ///< [rows][columns], added to
};

/// Packs the lines that there are of a group of rows, one by pack_row(i, its lanes), and makes the others zero.
template <class MicroKernel, class PackRow>
void pack_lines(const Operand& o, int64_t outer, float* out, const PackRow& pack_row) {
  const int64_t lines = std::min(o.outer - outer, kLaneGroup);
  for (int64_t i = 0; i < lines; ++i) pack_row(i, out + i * MicroKernel::kRowLanes);
  std::fill(out + lines * MicroKernel::kRowLanes, out + kLaneGroup * MicroKernel::kRowLanes, 0.0f);
}

/// Columns of a micro-tile that were packed: [columns / 16][MicroKernel::kPanelLanes][16].
template <class MicroKernel>
struct PackedColumns {
  float* lanes;

  /// A vector of columns of one lane.
  float* at(int64_t lane, int v) const {
    return lanes + lane * kLaneGroup + v * kLanes / kLaneGroup * (kLaneGroup * MicroKernel::kPanelLanes) +
           v * kLanes % kLaneGroup;
  }
  /// The lanes of the quad of positions [4 quad, 4 quad + 4).
  void read(int64_t quad, typename MicroKernel::Vector (&to)[4 / MicroKernel::kPerLane][MicroKernel::kVectors]) const {
#pragma GCC unroll 4
    for (int s = 0; s < 4 / MicroKernel::kPerLane; ++s)
#pragma GCC unroll 4
      for (int v = 0; v < MicroKernel::kVectors; ++v)
        to[s][v] = MicroKernel::load_lanes(at(quad * (4 / MicroKernel::kPerLane) + s, v));
  }
};

/// Columns that are decoded as they are multiplied, and packed for the rows that follow.
template <class MicroKernel, class Codes>
struct KeptColumns {
  Codes codes;
  PackedColumns<MicroKernel> kept;

  void read(int64_t quad, typename MicroKernel::Vector (&to)[4 / MicroKernel::kPerLane][MicroKernel::kVectors]) {
    codes.read(quad, to);
#pragma GCC unroll 4
    for (int s = 0; s < 4 / MicroKernel::kPerLane; ++s)
#pragma GCC unroll 4
      for (int v = 0; v < MicroKernel::kVectors; ++v)
        MicroKernel::store_lanes(kept.at(quad * (4 / MicroKernel::kPerLane) + s, v), to[s][v]);
  }
  void finish() const
    requires requires(const Codes& c) { c.finish(); }
  {
    codes.finish();
  }
};

/// Codes of a micro-tile's columns as they are stored, interleaved: of each vector of columns its quads.
template <class MicroKernel>
struct StoredColumns {
  static constexpr int64_t kGroups = MicroKernel::kVectors * kLanes / kLaneGroup;
  const uint8_t* quads[MicroKernel::kVectors];
  /// Bytes ahead of the codes that are read. One group of lines asks for twice as much: several groups together have as
  /// much on its way.
  int64_t ahead = kGroups == 1 ? 2 * kQuadsAhead : kQuadsAhead;

  StoredColumns(const Operand& o, int64_t col, const KPanel& panel) {
    for (int v = 0; v < MicroKernel::kVectors; ++v) {
      const int64_t outer = col + v * kLanes / kLaneGroup * kLaneGroup;
      // Where no columns are, sums are not used, and any codes will do.
      quads[v] = stored_quads(o, outer < o.outer ? outer : col, panel.begin) + v * kLanes % kLaneGroup * kQuadBytes;
    }
    // What follows the end of these columns' memory is that of their neighbours, or of the next tile's columns.
    const uint8_t *const first = stored_quads(o, col, 0), *const next = stored_quads(o, col + kLaneGroup, 0);
    if (quads[0] + ahead >= next) ahead += (kGroups - 1) * (next - first);
  }
  const uint8_t* at(int64_t quad, int v) const {
    const uint8_t* const from = quads[v] + quad * kQuadGroup;
    if (v * kLanes % kLaneGroup == 0) __builtin_prefetch(from + ahead);  // once for each group of lines
    return from;
  }
};

/// Adds what a block summed to, times its row's scale and its columns' scales if it has some.
template <bool Scaled>
inline void add_block(F32 block, const float* row_scale, const float* column_scales, float* sum) {
  if constexpr (Scaled) {
    store(sum, multiply_add(block * broadcast(*row_scale), load(column_scales), load(sum)));
  } else {
    store(sum, load(sum) + block);
  }
}

/// Lanes of a block are multiplied and summed in registers, then scaled and added to the sum: for 4-bit codes the
/// block's sum is exact. Scaled: block scales exist; else they are all 1.
template <class MicroKernel, int Rows, bool Scaled, class Columns>
[[gnu::noinline]] void multiply_rows_in_registers(const MicroTile& tile, const Columns& columns, const KPanel& panel) {
  constexpr int kCols = MicroKernel::kVectors * kLanes, kQuadLanes = 4 / MicroKernel::kPerLane;
  Columns from = columns;
  const float* a = tile.a;
  const float* a_scale = tile.a_scale;
  const float* b_scale = tile.b_scale;
  // Positions past the end of the panel are packed as zero, so that the last quad needs no other loop.
  const int64_t quads = ceil_div(panel.size, 4);
  for (int64_t quad = 0; quad < quads;) {
    // One block: its sums start at zero and stay in registers, a vector for each row and vector of columns.
    F32 t[Rows][MicroKernel::kVectors] = {};
    for (const int64_t end = std::min(quads, quad + panel.block / 4); quad < end; ++quad, a += kQuadLanes) {
      typename MicroKernel::Vector lanes[kQuadLanes][MicroKernel::kVectors];
      // Lanes that are loaded are loaded when their turn comes: sixteen registers do not hold those of a quad.
      constexpr bool kLoaded = std::is_same_v<Columns, PackedColumns<MicroKernel>>;
      if constexpr (!kLoaded) from.read(quad, lanes);
#pragma GCC unroll 4
      for (int s = 0; s < kQuadLanes; ++s) {
        if constexpr (kLoaded)
#pragma GCC unroll 16
          for (int v = 0; v < MicroKernel::kVectors; ++v)
            lanes[s][v] = MicroKernel::load_lanes(from.at(quad * kQuadLanes + s, v));
        // Each lane of columns is used by all rows while it is in a register.
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r) {
          const typename MicroKernel::Vector element = MicroKernel::broadcast_lane(a + r * MicroKernel::kRowLanes + s);
#pragma GCC unroll 16
          for (int v = 0; v < MicroKernel::kVectors; ++v)
            t[r][v] = MicroKernel::accumulate(element, lanes[s][v], t[r][v]);
        }
      }
    }
    // The block's sums times their scales, added to the sums in memory in the order of blocks.
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 16
      for (int v = 0; v < MicroKernel::kVectors; ++v)
        add_block<Scaled>(t[r][v], a_scale + r * kPanelBlocks, b_scale + v * kLanes, tile.sum + r * kCols + v * kLanes);
    }
    // The next block: along the scales of a row, and to the next line of the scales of columns.
    a_scale += 1;
    b_scale += kCols;
  }
  // Reports what was found in the codes: the caller may have to undo these sums.
  if constexpr (requires { from.finish(); }) from.finish();
}

/// Calls the kernel with the fewest rows that has enough of them.
template <class MicroKernel, int Rows, bool Scaled, class Columns>
void multiply_fewest_rows(const MicroTile& tile, const Columns& columns, const KPanel& panel) {
  if constexpr (Rows > MicroKernel::kRowStep)
    if (tile.rows <= Rows - MicroKernel::kRowStep)
      return multiply_fewest_rows<MicroKernel, Rows - MicroKernel::kRowStep, Scaled>(tile, columns, panel);
  MicroKernel::template multiply_rows<Rows, Scaled>(tile, columns, panel);
}
