// Operands of products: their quantized buffers, which a caller gives, a forward operator returned or a call allocates;
// of one tensor, and of groups of tokens, of which the linears of a mixture of experts are made.
#pragma once

#include <c10/util/SmallVector.h>

#include <span>

#include "quire/spec/problem.h"
#include "quire_torch/bridge/context.h"
#include "quire_torch/bridge/tensor.h"
#include "quire_torch/op/fields.h"

namespace quire_torch {

// Of one tensor

/// One direction of a tensor of `shape`.
struct Stored {
  const quire::QuantSpec& spec;
  quire::Direction direction;
  const quire::Shape<int64_t>& shape;
};

/// The six given buffers, of which those of one direction are checked, and columnwise ones that are there for a
/// backward pass.
BufferTensors given_buffers(const op::OptionalTensorList& buffers, const Stored& stored, const char* what);

/// Throws unless three buffers hold what is stored: a product of foreign buffers must not read past them. Their shapes
/// may differ (forward operators flatten some), their memory may not.
void check_saved(const std::array<at::Tensor, 3>& three, const Stored& stored, const char* what);

// Of groups of tokens

/// E, which is at least 1: of one group that has all rows where there are no offsets. Throws unless offsets is int32 or
/// int64 [E], the ends of the groups of rows of x, where x is.
int64_t group_count(const op::OptionalTensor& offsets, const at::Tensor& x, const char* what);

/// Offsets as the core's groups of `rows` rows, for the time of a call.
class GroupsView {
 public:
  GroupsView(const op::OptionalTensor& offsets, int64_t rows, const char* what) {
    groups_ = {.rows = rows, .what = what};
    if (!offsets) return;
    offsets_ = offsets->contiguous();
    groups_.count = offsets_.numel();
    groups_.ends = integers(offsets_);
  }
  operator const quire::RowGroups&() const { return groups_; }
  int64_t count() const { return groups_.count; }
  int64_t rows() const { return groups_.rows; }

 private:
  at::Tensor offsets_;
  quire::RowGroups groups_;
};

/// The tensor of a group, of rank `rank`, in a list of one for each or of one for all.
at::Tensor member(const op::TensorList& list, size_t group, int64_t rank);

/// The matrices of equal groups in such a list, for the time of a call: one of all, where a tensor stacks them, or each
/// by itself.
class GroupMatrices {
 public:
  GroupMatrices(const op::TensorList& list, int64_t groups, const char* what);
  /// Has no memory where there is a list.
  const quire::Matrix& all() const { return all_; }
  std::span<const quire::Matrix> each() const { return {matrices_.data(), matrices_.size()}; }

 private:
  void take_each(const op::TensorList& list, int64_t groups, const char* what);

  c10::SmallVector<MatrixView, 1> views_;
  c10::SmallVector<quire::Matrix, 1> matrices_;
  quire::Matrix all_;
};

/// The same of biases: a vector of each group, or none.
class GroupBiases {
 public:
  GroupBiases(const op::TensorList& list, int64_t groups, const char* what);
  const quire::Vector& all() const { return all_; }
  std::span<const quire::Vector> each() const { return {vectors_.data(), vectors_.size()}; }

 private:
  void take_each(const op::TensorList& list, int64_t groups, const char* what);

  c10::SmallVector<MatrixView, 1> views_;
  c10::SmallVector<quire::Vector, 1> vectors_;
  quire::Vector all_;
};

/// The same of contiguous matrices that are written.
class MutableGroupMatrices {
 public:
  MutableGroupMatrices(const op::TensorList& list, int64_t groups);
  const quire::MutableMatrix& all() const { return all_; }
  std::span<const quire::MutableMatrix> each() const { return {matrices_.data(), matrices_.size()}; }

 private:
  c10::SmallVector<quire::MutableMatrix, 1> matrices_;
  quire::MutableMatrix all_;
};

/// Three flat results, with room for the data, scales and amaxes of one direction of all groups, however many tokens
/// each group has.
template <class Int>
std::array<op::Result<Int>, 3> grouped_results(const quire::QuantSpec& spec, const quire::GroupSizes<Int>& sizes,
                                               quire::Direction direction, bool wanted);

/// The same for matrices [rows, k], one a group: exactly their buffers.
template <class Int>
std::array<op::Result<Int>, 3> stacked_results(const quire::QuantSpec& spec, const quire::Shape<Int>& matrix,
                                               int64_t groups, quire::Direction direction, bool wanted);

/// What operators keep of the rows of x: the first where there are offsets, the second where they are
/// one group.
template <class Int>
std::array<op::Result<Int>, 3> rows_results(const quire::QuantSpec& spec, const quire::GroupSizes<Int>& sizes,
                                            bool has_offsets, quire::Direction direction, bool wanted);

/// Flat buffers of one direction of groups, and the elements they have room for.
struct FlatBuffers {
  quire::Side side{};
  quire::BufferCounts<int64_t> room{};
};

/// Those in three tensors. Throws unless they are contiguous, of the dtypes of `spec`. what: "op: argument".
FlatBuffers flat_side(std::span<const at::Tensor> three, const quire::QuantSpec& spec, quire::Direction direction,
                      const char* what);

/// The scales of a slot, one for each group, in the scales of a state of delayed scaling; null if there is none. Throws
/// unless it is float32 [slots * groups].
const float* group_scales(const std::optional<at::Tensor>& scale, int64_t slots, int64_t groups, int64_t slot,
                          const char* what);

/// Which buffers are given: those of groups of rows with `cols` columns. shape: of the tensor of one group, where each
/// has as many rows.
struct GivenGroups {
  const quire::QuantSpec& spec;
  quire::Direction direction;
  quire::RowGroups groups;
  int64_t cols;
  quire::Shape<int64_t> shape{};

  /// w of each of `count` groups.
  static GivenGroups matrices(const quire::QuantSpec& spec, quire::Direction direction, int64_t count,
                              const std::array<int64_t, 2>& w) {
    return {spec, direction, quire::RowGroups::equal(count, w[0]), w[1], {w[0], w[1]}};
  }
};

/// An operand of products that is given quantized: six buffers for each group, or six flat ones for all. Throws for
/// another number, and unless they are those of spec and sizes.
class GivenOperand {
 public:
  GivenOperand(const op::OptionalTensorList& buffers, const GivenGroups& given, const char* what);
  /// Of the three that an operator returned, which may be flat.
  GivenOperand(const std::array<at::Tensor, 3>& three, const GivenGroups& given, const char* what);
  GivenOperand(const GivenOperand&) = delete;  // the operand points into each_
  GivenOperand& operator=(const GivenOperand&) = delete;
  operator const quire::Operand&() const { return operand_; }

 private:
  c10::SmallVector<quire::Side, 1> each_;
  quire::Operand operand_;
};

/// How the matrices of several groups are quantized, all of them alike.
struct GroupedRole {
  const char* what;  ///< "op: argument", for errors
  const char* role;  ///< "x", "w" or "dy"
  at::Device device;
  quire::QuantSpec spec{};
  bool rowwise = false, columnwise = false;
  quire::Randomness random{};    ///< group e draws with seed + e (numerics.md 0.19)
  const float* scale = nullptr;  ///< of delayed scaling, one a group
  const float* amax = nullptr;   ///< given, of the one direction that is wanted
  /// Results of the operator: data, scale and amax of the direction that is kept, where the other one is allocated; and
  /// the amaxes if there are scales.
  std::span<at::Tensor> results{};
  std::optional<quire::Direction> kept{};
  quire::RowGroups only{};  ///< as in QuantizeProblem
};

/// Groups of rows, quantized: memory and sides of the wanted directions.
class GroupedCodes {
 public:
  /// each: a matrix for each of equal groups, instead of x's memory.
  GroupedCodes(const quire::Matrix& x, std::span<const quire::Matrix> each, const quire::RowGroups& groups,
               const GroupedRole& q, const quire::Context& context);
  quire::Operand operand(quire::Direction direction) const;

 private:
  void allocate(quire::Direction direction, const GroupedRole& q);
  FlatBuffers side(quire::Direction direction) const;

  quire::QuantSpec spec_;
  quire::RowGroups groups_;
  int64_t cols_;
  const char* what_;
  BufferTensors buffers_;
  std::array<quire::Side, 2> only_;  ///< by direction, of one group
};

}  // namespace quire_torch
