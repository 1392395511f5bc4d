// Operands of the products of groups of tokens, of which the linears of a mixture of experts are made.
#pragma once

#include <span>
#include <vector>

#include "quire/spec/groups.h"
#include "quire_torch/ops/operand.h"

namespace quire_torch {

/// Which rows of [T, K] belong to which of E groups: group e has those from the end of the one before up to its own.
class Groups {
 public:
  /// offsets: int32 or int64 [E], the ends. Throws unless they do not decrease, are not negative and at most `tokens`.
  Groups(const at::Tensor& offsets, int64_t tokens, const char* what);
  /// `count` groups of `rows` each.
  static Groups equal(int64_t count, int64_t rows);

  size_t size() const { return ends_.size(); }
  int64_t begin(size_t group) const { return group == 0 ? 0 : ends_[group - 1]; }
  int64_t rows(size_t group) const { return ends_[group] - begin(group); }
  /// Rows that belong to any group.
  int64_t end() const { return ends_.empty() ? 0 : ends_.back(); }

 private:
  Groups() = default;
  std::vector<int64_t> ends_;
};

/// E, which is at least 1. Throws unless offsets is int32 or int64 [E].
int64_t group_count(const at::Tensor& offsets, const char* what);

/// The rows of each group of a matrix.
std::vector<quire::Matrix> rows_of(const quire::Matrix& m, const Groups& groups);
/// The rows of one group of a contiguous one.
quire::MutableMatrix rows_of(const quire::MutableMatrix& m, const Groups& groups, size_t group);
/// Sets the rows that belong to no group to zero.
void zero_beyond(at::Tensor& t, const Groups& groups);

/// Three flat results with room for the buffers of one direction of all groups, however their tokens are divided.
template <class Int>
std::array<op::Result<Int>, 3> grouped_results(const quire::QuantSpec& spec, const quire::GroupSizes<Int>& sizes,
                                               quire::Direction direction, bool wanted) {
  if (!wanted) return results<Int>(spec, {}, direction, false);
  const auto counts = quire::grouped_counts(spec, sizes, direction);
  const auto scale = spec.row().scale == quire::ScaleKind::f32 ? at::kFloat : at::kByte;
  return {op::Result<Int>{{counts[0]}, at::kByte}, op::Result<Int>{{counts[1]}, scale},
          op::Result<Int>{{counts[2]}, at::kFloat}};
}

/// The same for matrices [rows, k], one a group: exactly their buffers.
template <class Int>
std::array<op::Result<Int>, 3> stacked_results(const quire::QuantSpec& spec, const quire::Shape<Int>& matrix,
                                               int64_t groups, quire::Direction direction, bool wanted) {
  auto r = results(spec, matrix, direction, wanted);
  if (!wanted) return r;
  for (auto& one : r) {
    const quire::Shape<Int> sizes(one.sizes.begin(), one.sizes.end());
    one.sizes = {quire::product(sizes, 0, sizes.size()) * Int(groups)};
  }
  return r;
}

/// One direction of quantized matrices, of each group [rows of the group, k].
struct GroupedLayout {
  const quire::QuantSpec& spec;
  const Groups& groups;
  int64_t k;
  quire::Direction direction;
};

/// The memory of each group in three flat buffers. Throws if they are too small; what: "op: argument".
std::vector<quire::Side> grouped_sides(std::span<const at::Tensor> three, const GroupedLayout& layout,
                                       const char* what);

/// Sets to zero what no group will write of buffers that are results, so that a call always gives the same bytes.
void clear_unwritten(std::span<const at::Tensor> three, const GroupedLayout& layout);

/// The scales of a slot, one for each group, in the scales of a state of delayed scaling; null if there is none. Throws
/// unless it is float32 [slots * groups].
const float* group_scales(const std::optional<at::Tensor>& scale, int64_t slots, int64_t groups, int64_t slot,
                          const char* what);

/// The same of matrices [rows, k] that are given quantized: six buffers for each group, or six flat ones for all;
/// throws for another number.
std::vector<quire::Side> given_sides(const op::OptionalTensorList& buffers, const GroupedLayout& layout, int64_t rows,
                                     const char* what);

/// A group's side as an operand of a product.
quire::Operand grouped_operand(const std::vector<quire::Side>& sides, const GroupedLayout& layout, size_t group);

/// The values of a group's rowwise codes.
struct GroupCodes {
  const std::vector<quire::Side>& sides;
  const GroupedLayout& layout;
  size_t group;
};
void decode_group(const GroupCodes& codes, const quire::MutableMatrix& out, const quire::Context& context);

/// How the matrices of several groups are quantized, all of them alike.
struct GroupedRole {
  const char* what;  ///< "op: argument", for errors
  const char* role;  ///< "x", "w" or "dy"
  quire::QuantSpec spec{};
  bool rowwise = false, columnwise = false;
  quire::Randomness random{};    ///< group e draws with seed + e (numerics.md 0.19)
  const float* scale = nullptr;  ///< of delayed scaling, one a group
  /// Three results of the operator: the side of the direction that is kept, where the other is allocated; and the
  /// amaxes if there are scales.
  std::span<at::Tensor> results{};
  std::optional<quire::Direction> kept{};
};

/// Matrices of groups, quantized: memory and sides of the wanted directions.
struct GroupedCodes {
  std::array<at::Tensor, 3> rowwise, columnwise;
  std::vector<quire::Side> rows, columns;
};

/// Quantizes a matrix of each group, [rows of the group, k]; those of 0 rows are left out. What is not written of the
/// buffers is zero, so that a call always gives the same bytes.
GroupedCodes quantize_groups(const std::vector<quire::Matrix>& matrices, const Groups& groups, int64_t k,
                             const GroupedRole& q, const quire::Context& context);

}  // namespace quire_torch
