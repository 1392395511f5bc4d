#include "quire/spec/problem.h"

#include "quire/base/check.h"

namespace quire {
namespace {

/// " in 4 groups", or nothing.
std::string in(const RowGroups& g) {
  return is_one(g) ? "" : text(" in ", g.count, g.ends.data ? "" : " equal", " groups");
}

std::string to_string(const Operand& o) {
  return text(o.spec.to_string(), o.direction == Direction::rowwise ? " rowwise" : " columnwise", " [", o.outer, ", ",
              o.contraction, "]", in(o.groups));
}

}  // namespace

std::string to_string(const QuantizeProblem& p) {
  return text("quantize ", name(p.x.dtype), " [", p.x.rows, ", ", p.x.cols, "]", in(p.groups), " to ",
              p.spec.to_string(), p.rowwise.data ? " rowwise" : "", p.columnwise.data ? " columnwise" : "",
              p.amax.rowwise || p.amax.columnwise ? " under a given amax" : "");
}

std::string to_string(const AmaxProblem& p) {
  return text("amax of ", name(p.x.dtype), " [", p.x.rows, ", ", p.x.cols, "]", in(p.groups), " for ",
              p.spec.to_string(), p.rowwise ? " rowwise" : "", p.columnwise ? " columnwise" : "");
}

std::string to_string(const DequantizeProblem& p) {
  return text("dequantize ", p.spec.to_string(), p.direction == Direction::rowwise ? " rowwise" : " columnwise",
              " of [", p.rows, ", ", p.cols, "]", in(p.groups), " to ", name(p.out.dtype));
}

std::string to_string(const ReorderProblem& p) { return text("reorder ", to_string(p.from)); }

std::string to_string(const GemmProblem& p) {
  return text("gemm ", to_string(p.a), " x ", to_string(p.b), " to ", name(p.out.dtype),
              p.bias || !p.biases.empty() ? " + bias" : "", p.addend ? " + addend" : "");
}

std::string to_string(const MatmulProblem& p) {
  const std::string b = p.codes ? to_string(*p.codes) : text("[", p.b.rows, ", ", p.b.cols, "]");
  return text("matmul [", p.a.rows, ", ", p.a.cols, p.transpose_a ? "]^T" : "]", in(p.groups), " x ", b,
              p.transpose_b ? "^T" : "", " in ", name(p.out.dtype), p.bias.data || !p.biases.empty() ? " + bias" : "");
}

std::string to_string(const ColumnSumProblem& p) {
  return text("column_sum ", name(p.x.dtype), " [", p.x.rows, ", ", p.x.cols, "]", in(p.groups), " to ",
              name(p.out_dtype));
}

}  // namespace quire
