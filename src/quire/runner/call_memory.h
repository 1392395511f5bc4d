// Memory for the time of one call of a runner.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "quire/base/context.h"
#include "quire/spec/problem.h"

namespace quire {

/// Planned piece by piece, then lent at once: by the context's workspace, or of the host's heap where it has none; what
/// a call of few tokens needs on the host lies in this object.
class CallMemory {
 public:
  /// Where `bytes` more will lie, aligned to 64 bytes.
  int64_t plan(int64_t bytes);
  void lend(const Context& context);

  template <class T>
  T* at(int64_t planned) const {
    return reinterpret_cast<T*>(memory_ + planned);
  }
  /// A contiguous matrix for which size_of(dtype) * rows * cols bytes are planned.
  MutableMatrix matrix(int64_t planned, DType dtype, int64_t rows, int64_t cols) const {
    return {memory_ + planned, dtype, rows, cols, cols};
  }

 private:
  static constexpr int64_t kAlignment = 64;

  int64_t bytes_ = 0;
  std::byte* memory_ = nullptr;
  std::shared_ptr<void> own_;
  alignas(kAlignment) std::array<std::byte, size_t{1} << 14> few_;
};

/// Rowwise codes of rows in groups, or of one matrix: where they lie, and for how many elements there is room.
struct RowCodes {
  Side side;
  BufferCounts<int64_t> room;
  RowGroups groups;
};

/// The same before there is memory.
class PlannedCodes {
 public:
  /// groups: how many divide the rows, as values that nobody has seen yet say; 0: none, the rows are one matrix.
  PlannedCodes(CallMemory& memory, const QuantSpec& spec, const std::array<int64_t, 2>& sizes, int64_t groups);
  RowCodes in(const CallMemory& memory, const RowGroups& groups) const;

 private:
  BufferCounts<int64_t> room_;
  std::array<int64_t, 3> places_{};
};

/// Bytes of each of these counts, which are of data, scale and amax.
std::array<int64_t, 3> bytes_of(const QuantSpec& spec, const BufferCounts<int64_t>& counts);

}  // namespace quire
