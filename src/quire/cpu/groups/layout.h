// Where the rows and the buffers of each group lie, which depends on values that only kernels read.
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <memory_resource>
#include <span>
#include <string_view>
#include <type_traits>
#include <vector>

#include "quire/spec/problem.h"

namespace quire::cpu {

/// Memory of the lists that a problem is cut into: of the stack, unless they are long. All of it goes back at once.
class ListMemory {
 public:
  template <class T>
  operator std::pmr::polymorphic_allocator<T>() {
    return &all_;
  }

 private:
  alignas(std::max_align_t) std::array<std::byte, size_t{1} << 14> first_;
  std::pmr::monotonic_buffer_resource all_{first_.data(), first_.size()};
};

/// The ends of groups of `rows` rows, read. Throws Error unless they obey RowGroups.
class Ends {
 public:
  Ends(const RowGroups& groups, int64_t rows, ListMemory& memory);

  size_t size() const { return ends_.size(); }
  int64_t begin(size_t group) const { return group == 0 ? 0 : ends_[group - 1]; }
  int64_t rows(size_t group) const { return ends_[group] - begin(group); }
  /// Rows that belong to any group.
  int64_t end() const { return ends_.empty() ? 0 : ends_.back(); }
  /// Groups that have rows.
  size_t filled() const { return filled_; }

 private:
  std::pmr::vector<int64_t> ends_;
  size_t filled_ = 0;
};

/// The matrix of a group: one of the list, or `rows` rows from `begin` on.
template <class AnyMatrix>
AnyMatrix matrix_of(AnyMatrix part, std::span<const AnyMatrix> each, size_t group,
                    std::array<int64_t, 2> begin_and_rows) {
  if (!each.empty()) return each[group];
  using Byte = std::conditional_t<std::same_as<AnyMatrix, Matrix>, const char, char>;
  const auto [begin, rows] = begin_and_rows;
  if (part.data) part.data = static_cast<Byte*>(part.data) + begin * part.row_stride * size_of(part.dtype);
  part.rows = rows;
  return part;
}
/// The rows of a group.
template <class AnyMatrix>
AnyMatrix matrix_of(const AnyMatrix& all, const Ends& ends, size_t group) {
  return matrix_of<AnyMatrix>(all, {}, group, {ends.begin(group), ends.rows(group)});
}

/// Sets the rows that belong to no group to zero.
void zero_beyond(const MutableMatrix& m, const Ends& ends);
/// Sets a matrix to zero.
void zero(const MutableMatrix& m);

/// One direction of quantized matrices [rows of the group, cols].
struct GroupedLayout {
  const QuantSpec& spec;
  Direction direction;
  const Ends& ends;
  int64_t cols;
  std::string_view what;  ///< "op: argument", for errors
};

/// Flat buffers of one direction of groups, and the elements they have room for.
struct FlatSide {
  const Side& memory;
  const BufferCounts<int64_t>& room;

  bool present() const { return memory.data || memory.scale || memory.amax; }
};

/// The side of each group, and the elements that all of them take.
struct CutSide {
  std::pmr::vector<Side> sides;
  BufferCounts<int64_t> taken{};
};
/// Throws Error if flat buffers are too small.
CutSide sides_of(const FlatSide& side, const GroupedLayout& layout, ListMemory& memory);

/// Sets to zero what no group will write of flat buffers that are results.
void clear_unwritten(const FlatSide& side, const QuantSpec& spec, const BufferCounts<int64_t>& taken);

/// An operand of products whose ends and sides are known.
class CutOperand {
 public:
  CutOperand(const Operand& operand, ListMemory& memory);

  const Ends& ends() const { return ends_; }
  /// A group of it as an operand.
  Operand operator[](size_t group) const;
  /// A group of it (rowwise) as values in `out`.
  DequantizeProblem decoded(size_t group, const MutableMatrix& out) const;

 private:
  const Operand& operand_;
  Ends ends_;
  std::pmr::vector<Side> sides_;
};

}  // namespace quire::cpu
