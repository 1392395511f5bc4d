// Where the rows and the buffers of each group lie, which depends on values that only kernels read.
#pragma once

#include <concepts>
#include <string_view>
#include <type_traits>
#include <vector>

#include "quire/spec/grouped_problem.h"

namespace quire::cpu {

/// The ends of groups, read. Throws Error unless they obey RowGroups.
class Ends {
 public:
  explicit Ends(const RowGroups& groups);

  size_t size() const { return ends_.size(); }
  int64_t begin(size_t group) const { return group == 0 ? 0 : ends_[group - 1]; }
  int64_t rows(size_t group) const { return ends_[group] - begin(group); }
  /// Rows that belong to any group.
  int64_t end() const { return ends_.empty() ? 0 : ends_.back(); }

 private:
  std::vector<int64_t> ends_;
};

/// The matrix of a group, of a GroupedMatrix or a MutableGroupedMatrix.
template <class Grouped>
auto matrix_of(const Grouped& m, const Ends& ends, size_t group) {
  if (!m.each.empty()) return m.each[group];
  auto part = m.rows;
  using Byte = std::conditional_t<std::same_as<Grouped, GroupedMatrix>, const char, char>;
  const int64_t first = ends.begin(group) * part.row_stride * size_of(part.dtype);
  if (part.data) part.data = static_cast<Byte*>(part.data) + first;
  part.rows = ends.rows(group);
  return part;
}

/// Sets the rows that belong to no group to zero.
void zero_beyond(const MutableMatrix& m, const Ends& ends);
/// The same, or the matrices of groups that have no rows.
void zero_unwritten(const MutableGroupedMatrix& m, const Ends& ends);

/// One direction of quantized matrices [rows of the group, cols].
struct GroupedLayout {
  const QuantSpec& spec;
  Direction direction;
  const Ends& ends;
  int64_t cols;
  std::string_view what;  ///< "op: argument", for errors
};

/// The side of each group. Throws Error if flat buffers are too small.
std::vector<Side> sides_of(const GroupedSide& side, const GroupedLayout& layout);

/// Sets to zero what no group will write of flat buffers that are results.
void clear_unwritten(const GroupedSide& side, const GroupedLayout& layout);

/// An operand of products whose ends and sides are known.
class CutOperand {
 public:
  explicit CutOperand(const GroupedOperand& operand)
      : operand_(operand),
        ends_(operand.groups),
        sides_(sides_of(operand.side, {operand.spec, operand.direction, ends_, operand.cols, operand.what})) {}

  const Ends& ends() const { return ends_; }
  /// A group of it as an operand.
  Operand operator[](size_t group) const;
  /// A group of it (rowwise) as values in `out`.
  DequantizeProblem decoded(size_t group, const MutableMatrix& out) const;

 private:
  const GroupedOperand& operand_;
  Ends ends_;
  std::vector<Side> sides_;
};

}  // namespace quire::cpu
