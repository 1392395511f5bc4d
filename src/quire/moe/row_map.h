// Where rows go when tokens are grouped by expert, and when groups of rows move (docs/moe.md 2).
#pragma once

#include <cstdint>
#include <span>

namespace quire {

/// Sorts the places of `ids` by expert, stably: row_map[i] is the rank of place i, or -1 where ids[i] is -1, and
/// offsets[e] the number of places whose expert is at most e.
struct ExpertRowsProblem {
  std::span<const int32_t> ids;  ///< from -1 to the number of experts - 1
  int32_t* row_map = nullptr;    ///< [ids]
  std::span<int32_t> offsets{};  ///< [experts]; empty: the number of experts is not known
};

/// Throws Error for an id out of range.
void expert_rows(const ExpertRowsProblem& problem);

/// Moves chunks of consecutive rows: row_map[i] is where row i goes when the chunks stand one after the other in
/// another order, each beginning at a multiple of `align`. Rows after the last chunk follow the last chunk.
struct ChunkRowsProblem {
  std::span<const int64_t> sizes;    ///< of the chunks
  std::span<const int64_t> order{};  ///< which chunk comes first, second, ...; empty: as they are
  int64_t align = 1;
  std::span<int32_t> row_map;  ///< [rows]
};

/// Throws Error if sizes are negative or more than the rows, or order is not one of the chunks.
void chunk_rows(const ChunkRowsProblem& problem);

}  // namespace quire
