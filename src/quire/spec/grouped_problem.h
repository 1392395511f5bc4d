// What is asked of kernels for groups of rows, such as the tokens of each expert: for each group what the problem of
// one tensor asks (numerics.md 0.19). Rows that belong to no group are zero in results, and so is what no group writes
// of flat buffers, so that a call always gives the same bytes.
#pragma once

#include <span>

#include "quire/spec/groups.h"
#include "quire/spec/moe_problem.h"
#include "quire/spec/pointwise_problem.h"

namespace quire {

/// Groups of consecutive rows of one matrix. Where each group ends lies in a tensor, which kernels alone read and
/// check: ends do not decrease and are from 0 to `rows`.
struct RowGroups {
  int64_t count = 0;            ///< E
  int64_t rows = 0;             ///< of the matrix
  Integers ends{};              ///< [E]; no data: each group has rows / count
  const char* what = "groups";  ///< the operation that was given the ends, for errors

  /// `count` groups of `each` rows.
  static RowGroups equal(int64_t count, int64_t each) { return {.count = count, .rows = times(count, each)}; }
};

/// Whether no end says where the one group lies: it has all rows.
inline bool is_one(const RowGroups& g) { return g.count == 1 && g.ends.data == nullptr; }

/// A matrix whose rows belong to groups; or one for each group.
struct GroupedMatrix {
  Matrix rows{};
  std::span<const Matrix> each{};
};
struct MutableGroupedMatrix {
  MutableMatrix rows{};
  std::span<const MutableMatrix> each{};
};

/// One direction's buffers of quantized groups: flat ones of all groups (groups.h), or a side for each.
struct GroupedSide {
  Side flat{};
  BufferCounts<int64_t> room{};  ///< elements of the flat buffers
  std::span<const Side> each{};

  bool present() const { return flat.data || flat.scale || flat.amax || !each.empty(); }
};

/// An operand of products: the groups of a quantized tensor [rows, cols], in one direction.
struct GroupedOperand {
  QuantSpec spec;
  Direction direction = Direction::rowwise;
  RowGroups groups;
  int64_t cols = 0;
  GroupedSide side;
  const char* what = "an operand";  ///< for errors
};

/// Quantizes each group.
struct GroupedQuantizeProblem {
  static constexpr std::string_view kOp = "grouped_quantize";
  QuantSpec spec;
  GroupedMatrix x;
  RowGroups groups;
  GroupedSide rowwise{}, columnwise{};
  Randomness random{};           ///< group e draws with seed + e
  const float* scale = nullptr;  ///< [E]: as in QuantizeProblem
  GivenAmax amax{};              ///< as GroupedAmaxProblem gives them
  RowGroups only{};              ///< count > 0: groups that have no rows here are left out
  const char* role = "";
  const char* what = "grouped_quantize: x";  ///< for errors
};

/// The amaxes of each group, grouped_amax_count() numbers for each direction whose pointer is not null; 0 where there
/// are no rows.
struct GroupedAmaxProblem {
  static constexpr std::string_view kOp = "grouped_amax";
  QuantSpec spec;
  Matrix x;
  RowGroups groups;
  float* rowwise = nullptr;
  float* columnwise = nullptr;
};

/// Decodes rowwise codes of groups.
struct GroupedDequantizeProblem {
  static constexpr std::string_view kOp = "grouped_dequantize";
  GroupedOperand from;
  MutableMatrix out;  ///< [rows, cols]
};

/// The product of each group. out: rows of the groups of a, or a matrix for each group.
struct GroupedGemmProblem {
  static constexpr std::string_view kOp = "grouped_gemm";
  GroupedOperand a, b;
  MutableGroupedMatrix out;
  std::span<const Vector> bias{};  ///< one for each group, or none
  bool accumulate = false;         ///< adds to what is in out
  GemmRole role{};
};

/// out = a b + bias, of plain matrices: a [M, K], b [K, N], or transposed. Operands are rounded to out's dtype first;
/// the order of summation is that of the library that multiplies.
struct MatmulProblem {
  static constexpr std::string_view kOp = "matmul";
  Matrix a, b;
  bool transpose_a = false, transpose_b = false;
  Vector bias{};      ///< [N], or absent
  MutableMatrix out;  ///< [M, N], f32, f16 or bf16
};

/// The same for each group. b: plain, or quantized: it is then decoded to out's dtype.
struct GroupedMatmulProblem {
  static constexpr std::string_view kOp = "grouped_matmul";
  RowGroups groups;
  GroupedMatrix a, b;
  bool transpose_a = false, transpose_b = false;
  GroupedOperand codes{};  ///< groups.count > 0: instead of b
  std::span<const Vector> bias{};
  MutableGroupedMatrix out;
};

/// out[e] = the sum over the rows of group e, as ColumnSumProblem has it.
struct GroupedColumnSumProblem {
  static constexpr std::string_view kOp = "grouped_column_sum";
  Matrix x;
  RowGroups groups;
  MutableMatrix out;  ///< [E, cols]
};

/// An activation whose result may be quantized group by group. Group e of `out` is quantized with scale[e].
struct GroupedActivationProblem {
  static constexpr std::string_view kOp = "grouped_activation";
  Activation activation;
  Matrix x;
  RowGroups groups;
  MutableMatrix y;  ///< as in Destination
  QuantSpec spec{};
  GroupedSide rowwise{}, columnwise{};
  const float* scale = nullptr;
};

/// Compares the fingerprint of each group's matrix with expected[e], where the group has rows.
struct GroupedFingerprintProblem {
  static constexpr std::string_view kOp = "grouped_fingerprint";
  std::span<const Matrix> x;
  RowGroups groups;
  const int64_t* expected = nullptr;  ///< [E]
  const char* what = "grouped_fingerprint";
};

std::string to_string(const GroupedQuantizeProblem& p);
std::string to_string(const GroupedAmaxProblem& p);
std::string to_string(const GroupedDequantizeProblem& p);
std::string to_string(const GroupedGemmProblem& p);
std::string to_string(const MatmulProblem& p);
std::string to_string(const GroupedMatmulProblem& p);
std::string to_string(const GroupedColumnSumProblem& p);
std::string to_string(const GroupedActivationProblem& p);
std::string to_string(const GroupedFingerprintProblem& p);

}  // namespace quire
