// Groups of the rows of one matrix, for tests of problems of groups.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "guarded.h"
#include "quire/spec/problem.h"

namespace quire::testing {

inline constexpr int64_t kRows = 70, kCols = 48;
inline const Array<int64_t> kEnds{5, 5, 37, 69};  // of 5, 0, 32 and 32 rows; one row is in no group
inline constexpr std::array kDirections{Direction::rowwise, Direction::columnwise};

inline RowGroups groups_of(const Array<int64_t>& ends, int64_t rows = kRows) {
  return {.count = std::ssize(ends), .rows = rows, .ends = {ends.data(), std::ssize(ends), true}, .what = "test"};
}

inline Matrix rows_of(const Matrix& m, size_t group) {
  const int64_t begin = group == 0 ? 0 : kEnds[group - 1];
  return {static_cast<const char*>(m.data) + begin * m.row_stride * size_of(m.dtype), m.dtype, kEnds[group] - begin,
          m.cols, m.row_stride};
}

/// Flat buffers of one direction of groups.
struct Flat {
  std::array<Guarded, 3> memory;
  Side side;
  BufferCounts<int64_t> room;

  Flat(const QuantSpec& spec, int64_t rows, int64_t cols, int64_t groups, Direction direction) {
    const auto counts = grouped_counts<int64_t>(spec, {rows, cols, groups}, direction);
    const int64_t scale = spec.row().scale == ScaleKind::f32 ? 4 : 1;
    memory = {Guarded(counts[0]), Guarded(counts[1] * scale), Guarded(counts[2] * 4)};
    side = {memory[0].data(), memory[1].data(), memory[2].as<float>()}, room = counts;
  }
  /// As the result of a problem.
  void receive(QuantizeProblem& p, Direction direction) {
    (direction == Direction::rowwise ? p.rowwise : p.columnwise) = side;
    (direction == Direction::rowwise ? p.room.rowwise : p.room.columnwise) = room;
  }
  bool untouched() const {
    return std::all_of(memory.begin(), memory.end(), [](const Guarded& g) {
      const auto* bytes = g.as<uint8_t>();
      return std::all_of(bytes, bytes + g.size(), [](uint8_t b) { return b == 0xCD; });
    });
  }
  bool intact() const {
    return std::all_of(memory.begin(), memory.end(), [](auto& g) { return g.intact(); });
  }
};

/// A quantization whose results are given later.
inline QuantizeProblem quantization(const QuantSpec& spec, const Matrix& x, const RowGroups& groups) {
  return {.spec = spec, .x = x, .rowwise = {}, .columnwise = {}, .random = {}, .groups = groups};
}

}  // namespace quire::testing
