// The rules of problems of groups that hold whatever the ends are. Kernels check the ends, and the problem of each
// group.
#include "quire/base/check.h"
#include "quire/spec/check_problem.h"

namespace quire {
namespace {

/// A list that a problem has instead of one matrix, side or bias for all groups.
template <class T>
void check_list(std::string_view op, std::string_view what, std::span<const T> list, const RowGroups& groups) {
  check(list.empty() || std::ssize(list) == groups.count, op, ": ", what, " must be given for each of ", groups.count,
        " groups; got ", list.size());
}

void check_groups(std::string_view op, const RowGroups& g) {
  check(g.count > 0 && g.rows >= 0, op, ": there must be at least one group and no negative number of rows; got ",
        g.count, " groups of ", g.rows, " rows");
  check(g.ends.data == nullptr || g.ends.count == g.count, op, ": each of ", g.count, " groups has one end; got ",
        g.ends.count);
  check(g.ends.data != nullptr || g.rows % g.count == 0, op, ": ", g.rows, " rows do not make ", g.count,
        " equal groups; give their ends");
}

void check_same_groups(std::string_view op, const RowGroups& a, const RowGroups& b) {
  check(a.count == b.count, op, ": operands must have the same number of groups; got ", a.count, " and ", b.count);
}

/// Matrices of groups: those of the list, or one with the rows of all.
template <class Grouped>
void check_matrices(std::string_view op, std::string_view what, const Grouped& m, const RowGroups& groups) {
  check_list(op, what, m.each, groups);
  for (const auto& one : m.each) check_extent(op, what, one);
  if (!m.each.empty()) return;
  check(m.rows.rows == groups.rows, op, ": ", what, " must have the ", groups.rows, " rows of the groups, got ",
        m.rows.rows);
  check_extent(op, what, m.rows);
}

void check_operand(std::string_view op, const GroupedOperand& o) {
  check_groups(op, o.groups);
  check_list(op, o.what, o.side.each, o.groups);
  check_sizes(op, o.what, o.groups.rows, o.cols);
}

bool is_float(DType t) { return t == DType::f32 || t == DType::f16 || t == DType::bf16; }

}  // namespace

void check_problem(const GroupedQuantizeProblem& p) {
  check_groups(p.kOp, p.groups);
  check_matrices(p.kOp, p.what, p.x, p.groups);
  check_list(p.kOp, "the rowwise side", p.rowwise.each, p.groups);
  check_list(p.kOp, "the columnwise side", p.columnwise.each, p.groups);
  check(p.x.each.empty() || p.groups.ends.data == nullptr, p.kOp, ": ", p.what,
        " is a matrix for each group, and these have ends; give one matrix, or equal groups");
  for (const Matrix& m : p.x.each)
    check(m.rows == p.groups.rows / p.groups.count && m.cols == p.x.each[0].cols, p.kOp, ": ", p.what, " must be [",
          p.groups.rows / p.groups.count, ", ", p.x.each[0].cols, "] for each group, got [", m.rows, ", ", m.cols, "]");
  if (p.only.count == 0) return;
  check_groups(p.kOp, p.only);
  check_same_groups(p.kOp, p.groups, p.only);
}

void check_problem(const GroupedAmaxProblem& p) {
  check_groups(p.kOp, p.groups);
  check_matrices(p.kOp, "x", GroupedMatrix{.rows = p.x}, p.groups);
  // What does not follow from rows: whether the spec has an amax.
  check_problem(AmaxProblem{.spec = p.spec, .x = {nullptr, p.x.dtype, 0, p.x.cols, p.x.cols}});
}

void check_problem(const GroupedDequantizeProblem& p) {
  check_operand(p.kOp, p.from);
  check_matrices(p.kOp, "out", MutableGroupedMatrix{.rows = p.out}, p.from.groups);
}

void check_problem(const GroupedGemmProblem& p) {
  check_operand(p.kOp, p.a);
  check_operand(p.kOp, p.b);
  check_same_groups(p.kOp, p.a.groups, p.b.groups);
  check_matrices(p.kOp, "out", p.out, p.a.groups);
  check_list(p.kOp, "a bias", p.bias, p.a.groups);
}

void check_problem(const MatmulProblem& p) {
  const int64_t rows = p.transpose_a ? p.a.cols : p.a.rows, length = p.transpose_a ? p.a.rows : p.a.cols;
  const int64_t cols = p.transpose_b ? p.b.rows : p.b.cols, other = p.transpose_b ? p.b.cols : p.b.rows;
  check(is_float(p.a.dtype) && is_float(p.b.dtype) && is_float(p.out.dtype), p.kOp,
        ": a, b and out must be float32, float16 or bfloat16; convert them");
  check(length == other && p.out.rows == rows && p.out.cols == cols, p.kOp, ": sizes do not agree; got ", to_string(p),
        " to [", p.out.rows, ", ", p.out.cols, "]");
  for (const Matrix& m : {p.a, p.b, Matrix(p.out)}) check_extent(p.kOp, "a matrix", m);
}

void check_problem(const GroupedMatmulProblem& p) {
  check_groups(p.kOp, p.groups);
  check_matrices(p.kOp, "a", p.a, p.groups);
  check_matrices(p.kOp, "out", p.out, p.groups);
  check_list(p.kOp, "a bias", p.bias, p.groups);
  if (p.codes.groups.count == 0) return check_matrices(p.kOp, "b", p.b, p.groups);
  check_operand(p.kOp, p.codes);
  check_same_groups(p.kOp, p.groups, p.codes.groups);
  check(p.codes.groups.ends.data == nullptr && p.codes.direction == Direction::rowwise, p.kOp,
        ": quantized operands are rowwise matrices of one size; got others");
}

void check_problem(const GroupedColumnSumProblem& p) {
  check_groups(p.kOp, p.groups);
  check_matrices(p.kOp, "x", GroupedMatrix{.rows = p.x}, p.groups);
  check_matrix(p.kOp, "out", p.out);
  check_shape(p.kOp, "out", p.out, p.groups.count, p.x.cols);
}

void check_problem(const GroupedActivationProblem& p) {
  check_groups(p.kOp, p.groups);
  check_matrices(p.kOp, "x", GroupedMatrix{.rows = p.x}, p.groups);
  check_sizes(p.kOp, "y", p.y.rows, p.y.cols);
  check(p.y.rows == p.groups.rows, p.kOp, ": y must have the ", p.groups.rows, " rows of the groups, got ", p.y.rows);
  check_list(p.kOp, "the rowwise side", p.rowwise.each, p.groups);
  check_list(p.kOp, "the columnwise side", p.columnwise.each, p.groups);
}

void check_problem(const GroupedFingerprintProblem& p) {
  check_groups(p.kOp, p.groups);
  check(std::ssize(p.x) == p.groups.count, p.kOp, ": there must be a matrix for each of ", p.groups.count,
        " groups; got ", p.x.size());
  check(p.expected != nullptr, p.kOp, ": expected is a null pointer; give the fingerprints");
}

}  // namespace quire
