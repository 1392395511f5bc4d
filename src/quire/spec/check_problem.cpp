#include "quire/spec/check_problem.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "quire/base/check.h"
#include "quire/spec/check_groups.h"

namespace quire {
namespace {

constexpr std::string_view kHalves[] = {"rowwise", "columnwise"};

std::string shape_text(const Shape<int64_t>& sizes) {
  std::string out;
  for (int64_t size : sizes) out += (out.empty() ? "" : ", ") + std::to_string(size);
  return "[" + out + "]";
}

/// check_extent(), inlined where it is called.
[[gnu::always_inline]] inline void check_reach(std::string_view op, std::string_view what, const Matrix& m) {
  check_sizes(op, what, m.rows, m.cols);
  check(m.data != nullptr || m.rows == 0 || m.cols == 0, op, ": ", what, " of [", m.rows, ", ", m.cols,
        "] is a null pointer; give its memory");
  int64_t reach = 0;
  const bool overflows = m.rows > 1 && (__builtin_mul_overflow(m.rows - 1, m.row_stride, &reach) ||
                                        __builtin_mul_overflow(reach, int64_t{8}, &reach));
  check(!overflows, op, ": row stride ", m.row_stride, " of ", what, " with ", m.rows,
        " rows reaches further than int64 can count; correct it");
}

/// A spec built by hand may break the rules of the grammar; one that survives its own text cannot.
void check_spec(std::string_view op, const QuantSpec& spec) {
  // The same few specs come back on every call.
  thread_local std::array<QuantSpec, 4> known;
  thread_local size_t oldest = 0;
  if (std::find(known.begin(), known.end(), spec) != known.end()) return;
  check(static_cast<size_t>(spec.family) < kFamilies.size() && static_cast<size_t>(spec.element) < kFormats.size(), op,
        ": spec has no such family or element format; build it with QuantSpec::parse");
  const std::string canonical = spec.to_string();
  if (QuantSpec::parse(canonical) != spec)
    fail(op, ": spec has options that '", canonical, "' does not take; build it with QuantSpec::parse");
  known[oldest] = spec;
  oldest = (oldest + 1) % known.size();
}

/// check_buffers() where one has no memory.
void check_missing(std::string_view op, const QuantSpec& spec, const Shape<int64_t>& shape, Direction direction,
                   const std::array<const void*, 3>& memory) {
  const Buffers<int64_t> b = buffers<int64_t>(spec, shape, direction);
  const std::array<const Buffer<int64_t>*, 3> all{&b.data, &b.scale, &b.amax};
  for (size_t i = 0; i < all.size(); ++i) {
    const Shape<int64_t>& sizes = all[i]->sizes;
    if (memory[i] != nullptr || product(sizes, 0, sizes.size()) == 0) continue;
    fail(op, ": ", kBufferNames[first_buffer(direction) + i], " of ", spec.to_string(), " is null but has shape ",
         shape_text(sizes), "; give all buffers of a direction, shaped as buffers() says, or none");
  }
}

/// Throws unless every buffer that holds something has memory. Asks for sizes, which take longer to find than a small
/// tensor to quantize, only where one has none.
void check_buffers(std::string_view op, const QuantSpec& spec, const Shape<int64_t>& shape, Direction direction,
                   const std::array<const void*, 3>& memory) {
  if (memory[0] && memory[1] && (memory[2] || !spec.row().has_amax)) return;
  check_missing(op, spec, shape, direction, memory);
}

/// An operand's codes and scales are read only if it has elements; an amax only where it scales them.
void check_stored(std::string_view op, const QuantSpec& spec, const Shape<int64_t>& shape, Direction direction,
                  std::array<const void*, 3> memory) {
  if (shape[0] == 0 || shape[1] == 0) return;
  if (spec.row().scale != ScaleKind::two_level) memory[2] = &spec;
  check_buffers(op, spec, shape, direction, memory);
}

void check_side(std::string_view op, const QuantizeProblem& p, Direction direction, const Side& side) {
  if (side.data == nullptr && side.scale == nullptr && side.amax == nullptr) return;
  check_buffers(op, p.spec, {p.x.rows, p.x.cols}, direction, {side.data, side.scale, side.amax});
}

/// Throws unless the scales of a spec follow from an amax above the blocks.
void check_has_amax(std::string_view op, const QuantSpec& spec) {
  if (amax_count<int64_t>(spec, 1) == 0)
    fail(op, ": scales of ", spec.to_string(), " follow from blocks alone, so there is no amax; leave it out, or use ",
         "fp8_tensor, fp8_row or nvfp4");
}

void check_given_amax(std::string_view op, const QuantizeProblem& p) {
  if (!p.amax.rowwise && !p.amax.columnwise) return;
  check_has_amax(op, p.spec);
  check(p.scale == nullptr, op, ": a scale and an amax are both given, and the scale would not follow from the amax; ",
        "leave one out");
}

/// All of a quantization but the memory of x, and but the sides of groups, whose sizes follow from the ends.
void check_quantization(std::string_view op, const QuantizeProblem& p) {
  check_spec(op, p.spec);
  if (p.scale == nullptr && p.spec.given)
    fail(op, ": ", p.spec, " has its scale from the caller, and there is none; give the static scale, or leave the ",
         "option 'given' out");
  if (p.scale != nullptr && p.spec.row().scope != Scope::tensor && !p.spec.given)
    fail(op, ": a static scale needs a family with one scale per tensor; got ", p.spec.to_string(),
         "; use fp8_tensor, or the option 'given', or leave the scale out");
  check_given_amax(op, p);
  if (p.in_groups()) return;
  check_side(op, p, Direction::rowwise, p.rowwise);
  check_side(op, p, Direction::columnwise, p.columnwise);
}

void check_destination(std::string_view op, const Destination& to, const std::array<int64_t, 2>& sizes,
                       const RowGroups& groups = {}) {
  check_float(op, "y", to.y.dtype);
  check_sizes(op, "y", to.y.rows, to.y.cols);
  check_shape(op, "y", to.y, sizes[0], sizes[1]);
  if (to.y.data != nullptr) check_output(op, "y", to.y);
  check(!to.spec.stochastic, op, ": ", to.spec, " rounds stochastically, which is for gradients; leave sr out");
  check(!to.spec.interleaved, op, ": ", to.spec,
        " is interleaved, which is for operands that are kept; leave interleaved out");
  QuantizeProblem quantization = to.quantization();
  quantization.groups = groups;
  check_quantization(op, quantization);
}

void check_vector(std::string_view op, std::string_view what, const Vector& v, int64_t count) {
  check_float(op, what, v.dtype);
  check(v.data != nullptr || count == 0, op, ": ", what, " of [", count, "] is a null pointer; give its memory");
}

bool transformed(const Operand& o) { return o.direction == Direction::columnwise && o.spec.hadamard != Hadamard::off; }

/// The tensor that it is a side of.
Shape<int64_t> shape_of(const Operand& o) {
  if (o.direction == Direction::columnwise) return {o.contraction, o.outer};
  return {o.outer, o.contraction};
}

Hadamard hadamard_of(const Operand& o) { return transformed(o) ? o.spec.hadamard : Hadamard::off; }

void check_operand(std::string_view op, std::string_view what, const Operand& o) {
  check_spec(op, o.spec);
  check_sizes(op, what, o.outer, o.contraction);
  if (o.in_groups()) return check_groups(op, o);
  check(!transformed(o) || o.contraction % 16 == 0, op, ": ", what,
        " is Hadamard-transformed in groups of 16 tokens but ", "contracts ", o.contraction,
        "; use columnwise_tokens() of its rows");
  check_stored(op, o.spec, shape_of(o), o.direction, {o.data, o.scale, o.amax});
}

}  // namespace

void check_float(std::string_view op, std::string_view what, DType dtype) {
  if (dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16) return;
  // A problem that was made by hand may hold a number that is no DType and has no name.
  const int number = static_cast<int>(dtype);
  fail(op, ": ", what, " must be float32, float16 or bfloat16; got ",
       dtype == DType::u8 ? std::string(name(dtype)) : "DType " + std::to_string(number), "; convert it first");
}

void check_output(std::string_view op, std::string_view what, const MutableMatrix& m) {
  check_matrix(op, what, m);
  check(m.rows <= 1 || m.row_stride >= m.cols, op, ": rows of ", what, " overlap: ", m.cols, " columns but row stride ",
        m.row_stride, "; make the row stride at least the number of columns");
}

// Every buffer made from rows x cols has at most (rows + 128) * (cols + 128) entries of at most 8 bytes.
void check_sizes(std::string_view op, std::string_view what, int64_t rows, int64_t cols) {
  check(rows >= 0 && cols >= 0, op, ": sizes of ", what, " must not be negative; got [", rows, ", ", cols,
        "]; correct them");
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max() / 8 - 128;
  check(rows <= kMost && cols <= kMost && rows + 128 <= kMost / (cols + 128), op, ": ", what, " of [", rows, ", ", cols,
        "] has more bytes than int64 can count; split it");
}

void check_extent(std::string_view op, std::string_view what, const Matrix& m) { check_reach(op, what, m); }

void check_matrix(std::string_view op, std::string_view what, const Matrix& m) {
  check_float(op, what, m.dtype);
  check_reach(op, what, m);
}

void check_shape(std::string_view op, std::string_view what, const Matrix& m, int64_t rows, int64_t cols) {
  check(m.rows == rows && m.cols == cols, op, ": ", what, " must be [", rows, ", ", cols, "]; got [", m.rows, ", ",
        m.cols, "]; reshape it");
}

void check_memory(std::string_view op, std::string_view what, const void* memory, int64_t count) {
  check(count >= 0, op, ": the size of ", what, " must not be negative; got ", count, "; correct it");
  check(memory != nullptr || count == 0, op, ": ", what, " of ", count, " elements is a null pointer; give its memory");
}

void check_problem(const QuantizeProblem& p) {
  p.in_groups() ? check_groups("quantize", p) : check_matrix("quantize", "x", p.x);
  check_quantization("quantize", p);
}

void check_problem(const AmaxProblem& p) {
  check_matrix("amax", "x", p.x);
  if (p.in_groups()) check_groups("amax", p.groups, p.x.rows);
  check_spec("amax", p.spec);
  check_has_amax("amax", p.spec);
}

void check_problem(const DequantizeProblem& p) {
  check_spec("dequantize", p.spec);
  check_sizes("dequantize", "the quantized tensor", p.rows, p.cols);
  check_output("dequantize", "out", p.out);
  const bool columnwise = p.direction == Direction::columnwise;
  const int64_t rows = columnwise ? p.cols : p.rows, cols = columnwise ? columnwise_tokens(p.spec, p.rows) : p.cols;
  check(p.out.rows == rows && p.out.cols == cols, "dequantize: out must be [", rows, ", ", cols, "] (",
        kHalves[columnwise ? 1 : 0], " of [", p.rows, ", ", p.cols, "]); got [", p.out.rows, ", ", p.out.cols,
        "]; reshape out");
  if (p.in_groups()) {
    check(!columnwise, "dequantize: of groups, rowwise codes are decoded; got columnwise ones");
    return check_groups("dequantize", p.groups, p.rows);
  }
  check_stored("dequantize", p.spec, {p.rows, p.cols}, p.direction, {p.data, p.scale, p.amax});
}

void check_problem(const ReorderProblem& p) {
  static constexpr float kAnyAmax = 0;
  check(!p.from.in_groups(), "reorder: takes one tensor, got ", p.from.groups.count, " groups; reorder each by itself");
  Operand from = p.from;
  from.amax = &kAnyAmax;  // it is not read
  check_operand("reorder", "from", from);
  const QuantSpec to = p.from.spec.reordered();
  check_spec("reorder", to);
  check_stored("reorder", to, shape_of(p.from), p.from.direction, {p.data, p.scale, &p});
}

void check_problem(const GemmProblem& p) {
  check_operand("gemm", "a", p.a);
  check_operand("gemm", "b", p.b);
  check(p.in_groups() || p.a.contraction == p.b.contraction, "gemm: a and b must agree on the contraction; got ",
        p.a.contraction, " and ", p.b.contraction, "; pass operands of the same product");
  check(hadamard_of(p.a) == hadamard_of(p.b),
        "gemm: a and b must be Hadamard-transformed alike, or the transform does ",
        "not cancel; quantize both with the same 'rht' option, or none");
  if (p.bias != nullptr) check_float("gemm", "bias", p.bias_dtype);
  if (p.in_groups()) return check_groups("gemm", p);
  check_output("gemm", "out", p.out);
  check(p.out.rows == p.a.outer && p.out.cols == p.b.outer, "gemm: out must be [", p.a.outer, ", ", p.b.outer,
        "]; got [", p.out.rows, ", ", p.out.cols, "]; reshape out");
}

void check_problem(const MatmulProblem& p) {
  const bool in_groups = p.in_groups();
  const int64_t count = in_groups ? std::max<int64_t>(p.groups.count, 1) : 1;
  const std::array<int64_t, 2> all =
      p.codes ? std::array{p.codes->rows(), p.codes->cols()} : std::array{p.b.rows, p.b.cols};
  const std::array<int64_t, 2> b{p.transpose_a ? all[0] : all[0] / count, all[1]};
  const int64_t rows = p.transpose_a ? times(count, p.a.cols) : p.a.rows, length = p.transpose_a ? p.a.rows : p.a.cols;
  const int64_t cols = p.transpose_b ? b[0] : b[1], other = p.transpose_b ? b[1] : b[0];
  for (const Matrix& m : {p.a, p.b, Matrix(p.out)}) check_float("matmul", "a matrix", m.dtype);
  check(length == other && p.out.rows == rows && p.out.cols == cols, "matmul: sizes do not agree; got ", to_string(p),
        " to [", p.out.rows, ", ", p.out.cols, "]");
  check_extent("matmul", "a", p.a);
  if (!p.codes && p.bs.empty()) check_extent("matmul", "b", p.b);
  if (p.outs.empty()) check_extent("matmul", "out", p.out);
  if (in_groups) check_groups("matmul", p);
}

void check_problem(const ColumnSumProblem& p) {
  check_matrix("column_sum", "x", p.x);
  if (p.in_groups()) check_groups("column_sum", p.groups, p.x.rows);
  check_float("column_sum", "out", p.out_dtype);
  check(p.out != nullptr || p.x.cols == 0, "column_sum: out of [", p.x.cols, "] is a null pointer; give its memory");
}

void check_problem(const NormProblem& p) {
  check_matrix("norm", "x", p.x);
  check_vector("norm", "gamma", p.gamma, p.x.cols);
  if (p.beta.data != nullptr) check_vector("norm", "beta", p.beta, p.x.cols);
  check(std::isfinite(p.eps) && p.eps >= 0, "norm: eps must be finite and not negative; got ", p.eps);
  check_destination("norm", p.out, {p.x.rows, p.x.cols});
}

void check_problem(const NormGradProblem& p) {
  check_matrix("norm_grad", "x", p.x);
  check_matrix("norm_grad", "dy", p.dy);
  check_shape("norm_grad", "dy", p.dy, p.x.rows, p.x.cols);
  check_vector("norm_grad", "gamma", p.gamma, p.x.cols);
  check(p.rstd != nullptr || p.x.rows == 0, "norm_grad: rstd is a null pointer; give what the norm wrote");
  check(p.mean != nullptr || p.x.rows == 0 || p.kind == NormKind::rms,
        "norm_grad: mean is a null pointer; give what the norm wrote");
  if (p.dx.data == nullptr) return;
  check_output("norm_grad", "dx", p.dx);
  check_shape("norm_grad", "dx", p.dx, p.x.rows, p.x.cols);
}

void check_problem(const ActivationProblem& p) {
  check_matrix("activation", "x", p.x);
  check(p.x.cols % p.activation.inputs() == 0, "activation: ", p.activation.row().name,
        " is gated and takes two halves of x; got ", p.x.cols, " columns; make their number even");
  if (p.in_groups()) check_groups("activation", p.groups, p.x.rows);
  check_destination("activation", p.out, {p.x.rows, p.x.cols / p.activation.inputs()}, p.groups);
}

void check_problem(const ActivationGradProblem& p) {
  check_matrix("activation_grad", "x", p.x);
  check_matrix("activation_grad", "dy", p.dy);
  check_shape("activation_grad", "x", p.x, p.dy.rows, p.dy.cols * p.activation.inputs());
  if (p.in_groups()) check_groups("activation_grad", p.groups, p.x.rows);
  check_output("activation_grad", "dx", p.dx);
  check_shape("activation_grad", "dx", p.dx, p.x.rows, p.x.cols);
}

void check_problem(const FingerprintProblem& p) {
  if (p.in_groups()) [[unlikely]]
    check_groups(p.what, p);
  else
    check_extent(p.what, "x", p.x);
  check(p.to != nullptr || p.expected != nullptr, p.what, ": nowhere to put the fingerprint; give its memory");
}

void check_problem(const AdvanceProblem& p) { check_memory(p.kOp, "value", p.value, 1); }

void check_problem(const MaximumProblem& p) {
  check_memory(p.kOp, "to", p.to, p.count);
  check_memory(p.kOp, "values", p.values, p.count);
}

void check_problem(const CollectProblem& p) {
  check_memory(p.kOp, "amax", p.amax, times(p.count, int64_t{2}));
  check_memory(p.kOp, "x_amax", p.of_x, p.count);
  check_memory(p.kOp, "usage", p.number, 1);
  check_memory(p.kOp, "rule", p.rule, 1);
}

void check_problem(const DelayedUpdateProblem& p) {
  check_memory(p.kOp, "rules", p.rules, times(p.rule_count, int64_t{kRuleColumns}));
  for (const DelayedState& s : p.states) {
    check_sizes(p.kOp, "history", s.rows, s.slots);
    check_memory(p.kOp, "history", s.history, s.rows * s.slots);
    check_memory(p.kOp, "scale", s.scale, s.slots);
    check_memory(p.kOp, "amax", s.amax, s.slots);
    check_memory(p.kOp, "reduced", s.reduced, s.slots);
    check_memory(p.kOp, "usage", s.usage, 3);
  }
}

}  // namespace quire
