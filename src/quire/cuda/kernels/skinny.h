// What the host asks the kernels of skinny.cu and skinny_rows.cu for: products of few rows x with many columns in
// codes, by tensor cores.
#pragma once

#include "quire/cuda/kernels/gemm.h"

namespace quire::cuda {

/// Rows of x in the order in which tensor cores take them: of each cut of the contraction the tiles of kSkinnyRows
/// rows, of a tile kSkinnyUnits times 16 bytes for each lane. Behind the ends are zeros. A group begins where all cuts
/// of skinny_tile_of() tiles would end.
struct SkinnyRows {
  void* numbers = nullptr;
  float* cut_scales = nullptr;  ///< what multiplies the cuts of a row, [cut][tile][row]; null: nothing
  float* factors = nullptr;     ///< what multiplies its finished sums, [tile][row]
};

inline constexpr int64_t kSkinnyRows = 8;
inline constexpr int64_t kSkinnyUnits = 4;

/// Before it there is room for the tiles of all groups before `group`, whose rows begin at `begin`.
constexpr int64_t skinny_tile_of(int64_t group, int64_t begin) { return begin / kSkinnyRows + group; }

/// Writes rows that are in codes. Scales of one byte are multiplied into them.
struct SkinnyCodesJob {
  GroupedOperand x;
  SkinnyRows to;
};

/// Writes rows of a matrix in bfloat16.
struct SkinnyPlainJob {
  Matrix x;
  Places groups;
  SkinnyRows to;
};

struct SkinnyJob {
  GroupedOperand w;  ///< one of each group: lines of 16-byte vectors that follow each other in memory
  Places groups;     ///< of the rows
  GroupedOutput out;
  SkinnyRows x;
  float constant = 1;      ///< of the product (numerics.md 5.10)
  bool plain = false;      ///< x is a matrix: outputs are those of a plain product
  float* parts = nullptr;  ///< of each output where blocks share a contraction: [part][row][column]
};

/// Slices that the contraction is divided into: cut c belongs to slice c % kSkinnySlices. A part is two slices.
inline constexpr int kSkinnySlices = 8, kSkinnyParts = kSkinnySlices / 2;

/// Columns that a warp computes.
inline constexpr int64_t kSkinnyColumns = 32;
inline constexpr unsigned kSkinnyThreads = 256;
/// Rows of each product that the narrow kernels compute at a time, whose block has all slices of 32 columns, and of all
/// products together that the wide ones take, whose block has one part of 128 columns.
inline constexpr int64_t kNarrowRows = 16, kWideRows = 64;
inline constexpr int64_t kWideColumns = 4 * kSkinnyColumns;

}  // namespace quire::cuda
