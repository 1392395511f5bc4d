// What the host asks the kernels of tiles for: blocks of threads that read a tile of a matrix once, for all that is
// computed of it.
#pragma once

#include "quire/cuda/kernels/groups.h"
#include "quire/spec/problem.h"

namespace quire::cuda {

/// Rows and columns of a tile: blocks of every family lie in one, in both directions.
inline constexpr int64_t kTile = 128;
inline constexpr unsigned kTileThreads = 256;

/// Bytes of shared memory of a tile of values: eight unused ones follow each 16 rows, so that threads that read
/// columns of several 16 rows at once use all banks.
constexpr unsigned tile_bytes(DType dtype) {
  return static_cast<unsigned>((kTile * kTile + kTile / 16 * 8) * size_of(dtype));
}

/// One direction of a quantization, for each group.
struct TileSide {
  Side side;
  const float* amaxes = nullptr;  ///< of each group, given or measured; null: none, or the kernel measures it
  Places groups;

  constexpr bool present() const { return side.data != nullptr; }
};

struct TileJob {
  QuantSpec spec;  ///< of which a kernel reads what is not compiled into it
  Matrix x;
  TileSide rowwise{}, columnwise{};
  Randomness random{};
  const float* scale = nullptr;  ///< QuantizeProblem::scale
  const Matrix* each = nullptr;  ///< as in AmaxJob
  RowGroups only{};              ///< as in QuantizeProblem
};

/// Amaxes of each group: of its values, and of its transformed columns. Of lines: of rows, and of columns.
struct TileAmaxJob {
  Matrix x;
  Places groups{};
  const Matrix* each = nullptr;
  uint32_t* plain = nullptr;        ///< bits, 0 at first; or null
  uint32_t* transformed = nullptr;  ///< the same
  bool signs = false;               ///< of the transform
  uint32_t* rows = nullptr;         ///< the same of each row of the matrix; or null
  uint32_t* columns = nullptr;      ///< the same of each column of each group; or null
};

}  // namespace quire::cuda
