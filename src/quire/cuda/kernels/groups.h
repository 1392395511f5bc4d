// Where the rows and the flat buffers of each group lie: what the host asks the kernels of groups.cu for.
#pragma once

#include <array>
#include <cstddef>

#include "quire/cuda/kernels/fault_site.h"
#include "quire/spec/flat_counts.h"

namespace quire::cuda {

/// One group: its rows of the matrix, and where its elements of data, scale and amax begin in flat buffers.
struct GroupPlace {
  int64_t begin = 0;
  int64_t rows = 0;
  std::array<int64_t, 3> at{};
};

/// The groups of a problem, for a kernel. No places: there is one, which is the tensor.
struct Places {
  const GroupPlace* places = nullptr;  ///< [count + 1]: the last one begins where the rows and buffers of all end
  int64_t count = 1;
  int64_t rows = 0;  ///< of the matrix

  /// Follows `places`: for kernels.
  constexpr GroupPlace operator[](int64_t group) const { return places ? places[group] : GroupPlace{0, rows, {}}; }
};

/// Writes `places`. Ends that break their rule, and groups that do not fit into the buffers, are reported, and all
/// groups are empty then.
struct PlaceJob {
  RowGroups groups;
  int64_t rows = 0;                    ///< of the matrix
  FlatCounts counts{};                 ///< all zero: there are no flat buffers
  BufferCounts<int64_t> room{};        ///< elements that each of them has
  int64_t cols = 0;                    ///< for the error
  FaultSite ends{};                    ///< under the operation that was given the ends
  std::array<FaultSite, 3> buffers{};  ///< under the name of each buffer
  GroupPlace* places = nullptr;
};

/// Zeroes the rows of `m` that belong to no group.
struct BeyondJob {
  MutableMatrix m;
  Places groups;
};

/// Zeroes what no group has of a flat buffer of codes.
struct RestJob {
  unsigned char* data = nullptr;
  int64_t room = 0;
  Places groups;
};

/// A part of a list of the host, which is gone before a kernel runs.
struct ListJob {
  static constexpr int64_t kBytes = 3840;
  std::array<unsigned char, kBytes> bytes;
  int64_t count = 0;  ///< of them
  unsigned char* to = nullptr;
};

}  // namespace quire::cuda
