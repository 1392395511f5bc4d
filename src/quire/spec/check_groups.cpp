#include "quire/spec/check_groups.h"

#include "quire/base/check.h"
#include "quire/spec/check_problem.h"

namespace quire {
namespace {

/// The rows that each group has; -1: its end says it.
int64_t rows_of_each(const RowGroups& groups, int64_t rows) {
  if (is_one(groups)) return rows;
  return groups.ends.data ? -1 : rows / groups.count;
}

/// A list that a problem has instead of one matrix, side or bias for all groups.
template <class T>
void check_list(std::string_view op, std::string_view what, std::span<const T> list, const RowGroups& groups) {
  check(list.empty() || std::ssize(list) == groups.count, op, ": ", what, " must be given for each of ", groups.count,
        " groups; got ", list.size());
}

/// A list of matrices, [rows, cols] each.
template <class AnyMatrix>
void check_matrices(std::string_view op, std::string_view what, std::span<const AnyMatrix> list,
                    const RowGroups& groups, const std::array<int64_t, 2>& sizes) {
  check_list(op, what, list, groups);
  check(list.empty() || sizes[0] >= 0, op, ": ", what,
        " is a matrix for each group, and these have ends; give one matrix, or equal groups");
  for (const auto& one : list) {
    check_extent(op, what, one);
    check_shape(op, what, one, sizes[0], sizes[1]);
  }
}

void check_biases(std::string_view op, std::span<const Vector> biases, const RowGroups& groups, int64_t cols) {
  check_list(op, "a bias", biases, groups);
  for (const Vector& bias : biases) {
    check_float(op, "a bias", bias.dtype);
    check_memory(op, "a bias", bias.data, cols);
  }
}

void check_same_count(std::string_view op, const RowGroups& a, const RowGroups& b) {
  check(a.count == b.count, op, ": operands must have the same number of groups; got ", a.count, " and ", b.count);
}

/// Groups that are left out where they have no rows.
void check_only(std::string_view op, const RowGroups& only, const RowGroups& groups) {
  if (only.ends.data == nullptr) return;
  check_groups(op, only, only.rows);
  check_same_count(op, groups, only);
}

/// How long the sums of each group are; -1: its end says it.
int64_t length_of_each(const Operand& o) {
  if (o.direction == Direction::rowwise) return o.contraction;
  const int64_t rows = rows_of_each(o.groups, o.rows());
  return rows < 0 ? rows : columnwise_tokens(o.spec, rows);
}

}  // namespace

void check_groups(std::string_view op, const RowGroups& g, int64_t rows) {
  check(g.count > 0 && rows >= 0, op, ": there must be at least one group and no negative number of rows; got ",
        g.count, " groups of ", rows, " rows");
  if (is_one(g)) return;
  check(g.rows == rows, op, ": groups must have the ", rows, " rows of the matrix, got ", g.rows);
  check(g.ends.data == nullptr || g.ends.count == g.count, op, ": each of ", g.count, " groups has one end; got ",
        g.ends.count);
  check(g.ends.data != nullptr || rows % g.count == 0, op, ": ", rows, " rows do not make ", g.count,
        " equal groups; give their ends");
}

void check_groups(std::string_view op, const QuantizeProblem& p) {
  check_groups(op, p.groups, p.x.rows);
  check_only(op, p.only, p.groups);
  if (p.each.empty()) return check_matrix(op, "x", p.x);
  check_sizes(op, "x", p.x.rows, p.x.cols);
  check_matrices(op, p.what, p.each, p.groups, {rows_of_each(p.groups, p.x.rows), p.x.cols});
}

void check_groups(std::string_view op, const FingerprintProblem& p) {
  check_groups(op, p.groups, p.x.rows);
  check_only(op, p.only, p.groups);
  check(p.only.ends.data == nullptr || p.expected != nullptr, op,
        ": groups are left out of a comparison alone; give the expected fingerprints");
  if (p.each.empty()) return check_extent(op, "x", p.x);
  check_matrices(op, "x", p.each, p.groups, {rows_of_each(p.groups, p.x.rows), p.x.cols});
}

void check_groups(std::string_view op, const Operand& o) {
  check_groups(op, o.groups, o.rows());
  check_list(op, o.what, o.each, o.groups);
}

void check_groups(std::string_view op, const GemmProblem& p) {
  const RowGroups& groups = p.a.groups;
  const bool rowwise = p.a.direction == Direction::rowwise;
  check_same_count(op, groups, p.b.groups);
  const int64_t length = length_of_each(p.a), other = length_of_each(p.b);
  check(length == other && (length >= 0 || p.a.groups.rows == p.b.groups.rows), op,
        ": the groups of a and b must agree on the contraction; got ", length, " and ", other, " (-1: as ends say)");
  const int64_t cols = p.b.direction == Direction::rowwise ? rows_of_each(p.b.groups, p.b.rows()) : p.b.outer;
  check(cols >= 0, op, ": a rowwise b must be equal groups, and these have ends");
  const int64_t each = rowwise ? rows_of_each(groups, p.a.rows()) : p.a.outer;
  const int64_t rows = rowwise ? p.a.rows() : times(groups.count, p.a.outer);
  check_shape(op, "out", p.out, rows, cols);
  check_matrices(op, "out", p.outs, groups, {each, cols});
  for (const MutableMatrix& out : p.outs) check_output(op, "out", out);
  if (p.outs.empty()) check_output(op, "out", p.out);
  check(p.addend == nullptr || p.addend == (p.outs.empty() ? p.out.data : p.outs[0].data), op,
        ": the addend of groups must be out itself; add another by itself");
  check_biases(op, p.biases, groups, cols);
}

void check_groups(std::string_view op, const MatmulProblem& p) {
  check_groups(op, p.groups, p.a.rows);
  const int64_t count = p.groups.count, each = rows_of_each(p.groups, p.a.rows);
  check(is_one(p.groups) || !p.transpose_a || (!p.transpose_b && !p.codes && p.bs.empty()), op,
        ": where a is transposed, groups are rows of a and b; got a b that has none");
  if (p.codes) {
    check_groups(op, *p.codes);
    check_same_count(op, p.groups, p.codes->groups);
    check(p.codes->groups.ends.data == nullptr && p.codes->direction == Direction::rowwise, op,
          ": quantized operands are rowwise matrices of one size; got others");
  }
  check(p.transpose_a || p.codes || p.b.rows % count == 0, op, ": ", p.b.rows, " rows of b do not make ", count,
        " matrices of one size");
  check_matrices(op, "b", p.bs, RowGroups::equal(count, p.b.rows / count), {p.b.rows / count, p.b.cols});
  for (const Matrix& b : p.bs) check_float(op, "b", b.dtype);
  check_matrices(op, "out", p.outs, p.groups, {p.transpose_a ? p.a.cols : each, p.out.cols});
  check_biases(op, p.biases, p.groups, p.out.cols);
}

}  // namespace quire
