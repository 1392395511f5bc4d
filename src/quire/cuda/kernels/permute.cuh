// Rows between the order of tokens and the order of experts: what every kernel does with a map.
#pragma once

#include "quire/base/shape.h"
#include "quire/cuda/kernels/fault.cuh"
#include "quire/cuda/kernels/moe.h"
#include "quire/cuda/kernels/threads.cuh"
#include "quire/format/element.h"
#include "quire/spec/row_map.h"

namespace quire::cuda {

/// The row of a place of a map, -1 for none. A number that breaks the rule is reported by one lane, and none.
__device__ inline int64_t row_of(const RowMap& map, int64_t place, int64_t rows, const FaultSite& site, bool reports) {
  const int32_t row = map.rows[place];
  if (is_number_or_none(row, rows)) return row;
  if (reports)
    report(site, ValueRule::row_map,
           {.index = place / map.slots, .value = row, .limit = rows, .more = {place % map.slots}});
  return -1;
}

template <class AnyMatrix>
__device__ auto* row_at(const AnyMatrix& m, int64_t row) {
  using Byte = std::conditional_t<std::is_same_v<AnyMatrix, Matrix>, const std::byte, std::byte>;
  return static_cast<Byte*>(m.data) + row * m.row_stride * size_of(m.dtype);
}

/// Calls each(piece) with this lane's ones of a segment.
template <class Each>
__device__ void each_piece(const Segments& row, int64_t segment, const Each& each) {
  const int64_t first = segment * Segments::kPieces * kWarp + lane();
  for (int64_t i = 0; i < Segments::kPieces; ++i)
    if (const int64_t piece = first + i * kWarp; piece < row.pieces) each(piece);
}

/// How a row is copied: units of `bytes`.
struct Copy {
  const Segments& row;
  int64_t bytes;

  /// A segment, or zeros.
  __device__ void operator()(const std::byte* from, std::byte* to, int64_t segment) const {
    switch (bytes) {
      case 16:
        return copy<uint4>(from, to, segment);
      case 4:
        return copy<uint32_t>(from, to, segment);
      case 2:
        return copy<uint16_t>(from, to, segment);
      default:
        return copy<uint8_t>(from, to, segment);
    }
  }

 private:
  /// Reads all of a lane's units before it writes any.
  template <class Unit>
  __device__ void copy(const std::byte* from, std::byte* to, int64_t segment) const {
    const int64_t first = segment * Segments::kPieces * kWarp + lane();
    Unit held[Segments::kPieces];
    QUIRE_UNROLL
    for (int64_t i = 0; i < Segments::kPieces; ++i) {
      const bool exists = from && first + i * kWarp < row.pieces;
      held[i] = exists ? reinterpret_cast<const Unit*>(from)[first + i * kWarp] : Unit{};
    }
    QUIRE_UNROLL
    for (int64_t i = 0; i < Segments::kPieces; ++i)
      if (first + i * kWarp < row.pieces) reinterpret_cast<Unit*>(to)[first + i * kWarp] = held[i];
  }
};

/// Of two places of one row, the one that find_sources() wrote first is no longer there.
__device__ inline void check_sources(const PermuteJob& job) {
  const PermuteProblem& p = job.problem;
  each_of(p.map.tokens * p.map.slots, [&](int64_t place) {
    const int64_t row = p.map.rows[place];
    if (row < 0 || row >= p.to.rows || job.source[row] == place) return;
    const int64_t other = job.source[row];
    report(job.site, ValueRule::row_once,
           {.index = place < other ? other : place, .value = row, .more = {place < other ? place : other}});
  });
}

}  // namespace quire::cuda
