#include "quire/spec/one_group.h"

#include "quire/base/check.h"

namespace quire {
namespace {

/// The matrix of all rows.
template <class Grouped>
auto matrix_of(const Grouped& m) {
  return m.each.empty() ? m.rows : m.each[0];
}

/// The side of a tensor [rows, cols].
struct OneSide {
  const QuantSpec& spec;
  Direction direction;
  int64_t rows, cols;
  std::string_view what;

  Side of(const GroupedSide& side) const {
    if (!side.each.empty()) return side.each[0];
    if (!side.present()) return {};
    const auto wanted = counts(buffers<int64_t>(spec, {rows, cols}, direction));
    for (size_t i = 0; i < wanted.size(); ++i)
      if (side.room[i] != wanted[i])
        fail(what, ": ", kBufferNames[first_buffer(direction) + i], " of ", spec.to_string(), " for [", rows, ", ",
             cols, "] must hold ", wanted[i], " elements, got ", side.room[i]);
    return side.flat.with_sentinel_data();
  }
};

Side side_of(const GroupedOperand& o) { return OneSide{o.spec, o.direction, o.groups.rows, o.cols, o.what}.of(o.side); }

Operand operand_of(const GroupedOperand& o) {
  const bool rowwise = o.direction == Direction::rowwise;
  const Side side = side_of(o);
  return {.spec = o.spec,
          .direction = o.direction,
          .outer = rowwise ? o.groups.rows : o.cols,
          .contraction = rowwise ? o.cols : columnwise_tokens(o.spec, o.groups.rows),
          .data = side.data,
          .scale = side.scale,
          .amax = side.amax};
}

Vector bias_of(std::span<const Vector> biases) { return biases.empty() ? Vector{} : biases[0]; }

}  // namespace

QuantizeProblem problem_of_one(const GroupedQuantizeProblem& p) {
  const Matrix x = matrix_of(p.x);
  const auto side = [&](Direction d, const GroupedSide& s) { return OneSide{p.spec, d, x.rows, x.cols, p.what}.of(s); };
  return {.spec = p.spec,
          .x = x,
          .rowwise = side(Direction::rowwise, p.rowwise),
          .columnwise = side(Direction::columnwise, p.columnwise),
          .random = p.random,
          .scale = p.scale,
          .amax = p.amax,
          .role = p.role};
}

DequantizeProblem problem_of_one(const GroupedDequantizeProblem& p) {
  const Side side = side_of(p.from);
  return {.spec = p.from.spec,
          .direction = p.from.direction,
          .rows = p.from.groups.rows,
          .cols = p.from.cols,
          .data = side.data,
          .scale = side.scale,
          .amax = side.amax,
          .out = p.out};
}

GemmProblem problem_of_one(const GroupedGemmProblem& p) {
  const MutableMatrix out = matrix_of(p.out);
  const Vector bias = bias_of(p.bias);
  return {.a = operand_of(p.a),
          .b = operand_of(p.b),
          .out = out,
          .bias = bias.data,
          .bias_dtype = bias.dtype,
          .addend = p.accumulate ? out.data : nullptr,
          .role = p.role};
}

MatmulProblem problem_of_one(const GroupedMatmulProblem& p) {
  return {.a = matrix_of(p.a),
          .b = matrix_of(p.b),
          .transpose_a = p.transpose_a,
          .transpose_b = p.transpose_b,
          .bias = bias_of(p.bias),
          .out = matrix_of(p.out)};
}

ColumnSumProblem problem_of_one(const GroupedColumnSumProblem& p) {
  return {.x = p.x, .out = p.out.data, .out_dtype = p.out.dtype};
}

FingerprintProblem problem_of_one(const GroupedFingerprintProblem& p) {
  return {.x = p.x[0], .expected = p.expected, .what = p.what};
}

}  // namespace quire
