// What memory does while a tile is computed: the next tile is asked for, and lines of the last one are put in place.
// Done at once, each of them would make the processor wait for memory.
#pragma once

#include "quire/cpu/generic/elements/encode.inl.h"
#include "quire/cpu/generic/elements/lines.inl.h"

/// Rows of memory that are needed next, or none.
struct Ahead {
  const char* first = nullptr;
  int64_t stride = 0, bytes = 0;

  void ask(int64_t r) const {
    if (first) prefetch(first + r * stride, bytes);
  }
};

/// The rows of the tile after this one: beside it, or of the next band. They may lie beyond the tensor: they are only
/// prefetched.
inline Ahead next_tile(const Matrix& x, const Tile& tile) {
  const int64_t col = tile.col + tile.cols;
  const void* first = col < x.cols ? element_of(x, tile.row, col) : element_of(x, tile.row + tile.rows, 0);
  const int64_t size = size_of(x.dtype);
  return {static_cast<const char*>(first), x.row_stride * size, tile.cols * size};
}

/// Lines of finished codes that are still to be put where they belong.
struct Finished {
  alignas(64) uint8_t codes[kTile][kTile];
  uint8_t* to;
  int64_t stride, bytes, lines = 0;  ///< from line to line of `to`, and of each line
  bool streams;
  int64_t done = 0;

  void put_one() {
    if (done < lines) put(codes[done], bytes, to + done * stride, streams), ++done;
  }
  void put_all() {
    while (done < lines) put_one();
  }
};

/// What a loop over the rows of a tile does beside its own work.
struct Meanwhile {
  Ahead ahead = {};
  bool one_line = false;  ///< whether the tile is a piece of a line, which asks for the rest of the line by itself
  Finished* finished = nullptr;

  void at_row(int64_t r) const {
    ahead.ask(r);
    if (finished) finished->put_one();
  }
};
