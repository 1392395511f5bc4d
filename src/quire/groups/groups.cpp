#include "quire/groups/groups.h"

#include "quire/device/dispatch.h"

namespace quire {
namespace {

// ---------------------------------------------------------------- the problem of the tensor that one group is

/// What a list has for the one group.
template <class List>
auto only(std::string_view op, const List& list) {
  check(list.size() == 1, op, ": a list for one group must have one member, got ", list.size());
  return list[0];
}

/// The matrix of all rows.
template <class Grouped>
auto matrix_of(std::string_view op, const Grouped& m) {
  return m.each.empty() ? m.rows : only(op, m.each);
}

/// The side of a tensor [rows, cols].
struct OneSide {
  const QuantSpec& spec;
  Direction direction;
  int64_t rows, cols;
  std::string_view what;

  Side of(const GroupedSide& side) const {
    if (!side.each.empty()) return only(what, side.each);
    if (!side.present()) return {};
    const auto wanted = counts(buffers<int64_t>(spec, {rows, cols}, direction));
    for (size_t i = 0; i < wanted.size(); ++i)
      if (side.room[i] != wanted[i])
        fail(what, ": ", kBufferNames[first_buffer(direction) + i], " of ", spec.to_string(), " for [", rows, ", ",
             cols, "] must hold ", wanted[i], " elements, got ", side.room[i]);
    return side.flat;
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

Vector bias_of(std::string_view op, std::span<const Vector> biases) {
  return biases.empty() ? Vector{} : only(op, biases);
}

QuantizeProblem problem_of_one(const GroupedQuantizeProblem& p) {
  const Matrix x = matrix_of(p.kOp, p.x);
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
  const MutableMatrix out = matrix_of(p.kOp, p.out);
  const Vector bias = bias_of(p.kOp, p.bias);
  return {.a = operand_of(p.a),
          .b = operand_of(p.b),
          .out = out,
          .bias = bias.data,
          .bias_dtype = bias.dtype,
          .addend = p.accumulate ? out.data : nullptr,
          .role = p.role};
}

MatmulProblem problem_of_one(const GroupedMatmulProblem& p) {
  return {.a = matrix_of(p.kOp, p.a),
          .b = matrix_of(p.kOp, p.b),
          .transpose_a = p.transpose_a,
          .transpose_b = p.transpose_b,
          .bias = bias_of(p.kOp, p.bias),
          .out = matrix_of(p.kOp, p.out)};
}

ColumnSumProblem problem_of_one(const GroupedColumnSumProblem& p) {
  check(p.x.rows == p.groups.rows && p.out.rows == 1 && p.out.cols == p.x.cols, p.kOp, ": x and out of one group of ",
        p.groups.rows, " rows must be [", p.groups.rows, ", K] and [1, K]; got [", p.x.rows, ", ", p.x.cols, "] and [",
        p.out.rows, ", ", p.out.cols, "]");
  return {.x = p.x, .out = p.out.data, .out_dtype = p.out.dtype};
}

FingerprintProblem problem_of_one(const GroupedFingerprintProblem& p) {
  return {.x = only(p.kOp, p.x), .expected = p.expected, .what = p.what};
}

}  // namespace

void grouped_quantize(const GroupedQuantizeProblem& p, const Context& context) {
  if (is_one(p.groups) && p.only.ends.data == nullptr) return dispatch(problem_of_one(p), context);
  dispatch(p, context);
}

void grouped_amax(const GroupedAmaxProblem& p, const Context& context) { dispatch(p, context); }

void grouped_dequantize(const GroupedDequantizeProblem& p, const Context& context) {
  if (is_one(p.from.groups)) return dispatch(problem_of_one(p), context);
  dispatch(p, context);
}

void grouped_gemm(const GroupedGemmProblem& p, const Context& context) {
  if (is_one(p.a.groups) && is_one(p.b.groups)) return dispatch(problem_of_one(p), context);
  dispatch(p, context);
}

void grouped_matmul(const GroupedMatmulProblem& p, const Context& context) {
  const bool codes = p.codes.groups.count > 0;
  if (is_one(p.groups) && !codes) return dispatch(problem_of_one(p), context);
  dispatch(p, context);
}

void grouped_column_sum(const GroupedColumnSumProblem& p, const Context& context) {
  if (is_one(p.groups)) return dispatch(problem_of_one(p), context);
  dispatch(p, context);
}

void grouped_activation(const GroupedActivationProblem& p, const Context& context) { dispatch(p, context); }

void grouped_fingerprint(const GroupedFingerprintProblem& p, const Context& context) {
  if (!is_one(p.groups)) return dispatch(p, context);
  const FingerprintProblem one = problem_of_one(p);
  if (p.groups.rows > 0) dispatch(one, context);
}

}  // namespace quire
