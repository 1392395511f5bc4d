#include "quire/spec/grouped_problem.h"

#include "quire/base/check.h"

namespace quire {
namespace {

const char* name(Direction d) { return d == Direction::rowwise ? "rowwise" : "columnwise"; }

std::string to_string(const RowGroups& g) {
  return text(g.count, g.ends.data ? "" : " equal", " groups of ", g.rows, " rows");
}

std::string to_string(const GroupedOperand& o) {
  return text(o.spec.to_string(), " ", name(o.direction), " of ", to_string(o.groups), " of ", o.cols);
}

}  // namespace

std::string to_string(const GroupedQuantizeProblem& p) {
  return text("quantize ", to_string(p.groups), " to ", p.spec.to_string(), p.rowwise.present() ? " rowwise" : "",
              p.columnwise.present() ? " columnwise" : "");
}

std::string to_string(const GroupedAmaxProblem& p) {
  return text("amax of ", to_string(p.groups), " of ", p.x.cols, " for ", p.spec.to_string());
}

std::string to_string(const GroupedDequantizeProblem& p) {
  return text("dequantize ", to_string(p.from), " to ", name(p.out.dtype));
}

std::string to_string(const GroupedGemmProblem& p) {
  return text("gemm ", to_string(p.a), " x ", to_string(p.b), p.bias.empty() ? "" : " + bias",
              p.accumulate ? " + addend" : "");
}

std::string to_string(const MatmulProblem& p) {
  return text("matmul [", p.a.rows, ", ", p.a.cols, p.transpose_a ? "]^T" : "]", " x [", p.b.rows, ", ", p.b.cols,
              p.transpose_b ? "]^T" : "]", " in ", name(p.out.dtype), p.bias.data ? " + bias" : "");
}

std::string to_string(const GroupedMatmulProblem& p) {
  return text("matmul of ", to_string(p.groups), p.bias.empty() ? "" : " + bias");
}

std::string to_string(const GroupedColumnSumProblem& p) {
  return text("column_sum of ", to_string(p.groups), " of ", p.x.cols);
}

std::string to_string(const GroupedActivationProblem& p) {
  return text(p.activation.to_string(), " of ", to_string(p.groups), " of ", p.x.cols);
}

std::string to_string(const GroupedFingerprintProblem& p) { return text("fingerprints of ", p.x.size(), " matrices"); }

}  // namespace quire
