#include "quire/cpu/groups/groups.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "quire/base/parallel.h"
#include "quire/cpu/groups/layout.h"
#include "quire/cpu/workspace.h"
#include "quire/device/producer.h"

namespace quire::cpu {
namespace {

int64_t cost_of(const QuantizeProblem& p) { return times(p.x.rows, p.x.cols); }
int64_t cost_of(const AmaxProblem& p) { return times(p.x.rows, p.x.cols); }
int64_t cost_of(const DequantizeProblem& p) { return times(p.rows, p.cols); }
int64_t cost_of(const ActivationProblem& p) { return times(p.x.rows, p.x.cols); }
int64_t cost_of(const ColumnSumProblem& p) { return times(p.x.rows, p.x.cols); }
/// A product of few rows takes as long as reading its columns.
int64_t cost_of(const GemmProblem& p) { return times(times(p.out.rows + 8, p.out.cols), p.a.contraction); }

void run(const ActivationProblem& p, const Context& context) { run_producer(p, context); }
template <class Problem>
void run(const Problem& p, const Context& context) {
  run_checked(p, context);
}

template <class Problem>
void check_each(const std::vector<Problem>& problems) {
  for (const Problem& p : problems) check_problem(p);
}

template <class Problem>
void run_each(const std::vector<Problem>& problems, const Context& context) {
  std::vector<int64_t> costs;
  costs.reserve(problems.size());
  for (const Problem& p : problems) costs.push_back(cost_of(p));
  parallel_tasks(costs, [&](size_t i) { run(problems[i], context); });
}

const float* at(const float* values, size_t group) { return values ? values + group : nullptr; }

/// None where the direction is absent.
std::vector<Side> wanted_sides(const GroupedSide& side, const GroupedLayout& layout) {
  return side.present() ? sides_of(side, layout) : std::vector<Side>();
}
Side at(const std::vector<Side>& sides, size_t group) { return sides.empty() ? Side{} : sides[group]; }

/// Where the amaxes of a group begin.
template <class Float>
Float* amaxes_of(Float* all, const GroupedLayout& layout, size_t group) {
  if (!all) return nullptr;
  if (!has_amax_per_line(layout.spec)) return all + group;
  const bool rowwise = layout.direction == Direction::rowwise;
  return all + (rowwise ? layout.ends.begin(group) : static_cast<int64_t>(group) * layout.cols);
}

void clear(float* values, int64_t count) {
  if (values) std::fill_n(values, count, 0.0f);
}

}  // namespace

void grouped_amax(const GroupedAmaxProblem& p, const Context& context) {
  const Ends ends(p.groups);
  const GroupedLayout rowwise{p.spec, Direction::rowwise, ends, p.x.cols, p.kOp},
      columnwise{p.spec, Direction::columnwise, ends, p.x.cols, p.kOp};
  const GroupedMatrix x{.rows = p.x};
  std::vector<AmaxProblem> problems;
  for (size_t e = 0; e < ends.size(); ++e)
    if (ends.rows(e) > 0)
      problems.push_back({.spec = p.spec,
                          .x = matrix_of(x, ends, e),
                          .rowwise = amaxes_of(p.rowwise, rowwise, e),
                          .columnwise = amaxes_of(p.columnwise, columnwise, e)});
  check_each(problems);
  const GroupSizes<int64_t> sizes{p.groups.rows, p.x.cols, p.groups.count};
  clear(p.rowwise, grouped_amax_count(p.spec, sizes, Direction::rowwise));
  clear(p.columnwise, grouped_amax_count(p.spec, sizes, Direction::columnwise));
  run_each(problems, context);
}

void grouped_quantize(const GroupedQuantizeProblem& p, const Context& context) {
  const Ends ends(p.groups);
  const std::optional<Ends> only = p.only.count > 0 ? std::optional<Ends>(p.only) : std::nullopt;
  const int64_t cols = p.x.each.empty() ? p.x.rows.cols : p.x.each[0].cols;
  const GroupedLayout rowwise{p.spec, Direction::rowwise, ends, cols, p.what},
      columnwise{p.spec, Direction::columnwise, ends, cols, p.what};
  const std::vector<Side> rows = wanted_sides(p.rowwise, rowwise), columns = wanted_sides(p.columnwise, columnwise);
  std::vector<QuantizeProblem> problems;
  for (size_t e = 0; e < ends.size(); ++e) {
    if (ends.rows(e) == 0 || (only && only->rows(e) == 0)) continue;
    Randomness random = p.random;
    random.seed += e;
    problems.push_back({.spec = p.spec,
                        .x = matrix_of(p.x, ends, e),
                        .rowwise = at(rows, e),
                        .columnwise = at(columns, e),
                        .random = random,
                        .scale = at(p.scale, e),
                        .amax = {.rowwise = amaxes_of(p.amax.rowwise, rowwise, e),
                                 .columnwise = amaxes_of(p.amax.columnwise, columnwise, e)},
                        .role = p.role});
  }
  check_each(problems);
  clear_unwritten(p.rowwise, rowwise);
  clear_unwritten(p.columnwise, columnwise);
  run_each(problems, context);
}

void grouped_dequantize(const GroupedDequantizeProblem& p, const Context& context) {
  const CutOperand from(p.from);
  const MutableGroupedMatrix out{.rows = p.out};
  std::vector<DequantizeProblem> problems;
  for (size_t e = 0; e < from.ends().size(); ++e)
    if (from.ends().rows(e) > 0) problems.push_back(from.decoded(e, matrix_of(out, from.ends(), e)));
  check_each(problems);
  zero_beyond(p.out, from.ends());
  run_each(problems, context);
}

void grouped_gemm(const GroupedGemmProblem& p, const Context& context) {
  const CutOperand a(p.a), b(p.b);
  std::vector<GemmProblem> problems;
  for (size_t e = 0; e < a.ends().size(); ++e) {
    if (a.ends().rows(e) == 0) continue;
    const MutableMatrix out = matrix_of(p.out, a.ends(), e);
    const Vector bias = p.bias.empty() ? Vector{} : p.bias[e];
    problems.push_back({.a = a[e],
                        .b = b[e],
                        .out = out,
                        .bias = bias.data,
                        .bias_dtype = bias.dtype,
                        .addend = p.accumulate ? out.data : nullptr,
                        .role = p.role});
  }
  check_each(problems);
  if (!p.accumulate) zero_unwritten(p.out, a.ends());
  run_each(problems, context);
}

void grouped_matmul(const GroupedMatmulProblem& p, const Context& context) {
  const Ends ends(p.groups);
  std::optional<CutOperand> codes;
  if (p.codes.groups.count > 0) codes.emplace(p.codes);
  const MutableMatrix out = p.out.each.empty() ? p.out.rows : p.out.each[0];
  const int64_t rows = codes ? codes->ends().rows(0) : 0, cols = codes ? p.codes.cols : 0;
  const WorkspaceSpan<char> memory(context, times(times(rows, cols), size_of(out.dtype)));
  const MutableMatrix decoded{std::span<char>(memory).data(), out.dtype, rows, cols, cols};
  std::vector<DequantizeProblem> decodings;
  std::vector<MatmulProblem> products;
  for (size_t e = 0; e < ends.size(); ++e) {
    if (ends.rows(e) == 0) continue;
    if (codes) decodings.push_back(codes->decoded(e, decoded));
    products.push_back({.a = matrix_of(p.a, ends, e),
                        .b = codes ? Matrix(decoded) : matrix_of(p.b, ends, e),
                        .transpose_a = p.transpose_a,
                        .transpose_b = p.transpose_b,
                        .bias = p.bias.empty() ? Vector{} : p.bias[e],
                        .out = matrix_of(p.out, ends, e)});
  }
  check_each(decodings);
  check_each(products);
  zero_unwritten(p.out, ends);
  // One after the other: the library that multiplies has threads of its own, and one matrix is decoded at a time.
  for (size_t i = 0; i < products.size(); ++i) {
    if (codes) run_checked(decodings[i], context);
    run_checked(products[i], context);
  }
}

void grouped_column_sum(const GroupedColumnSumProblem& p, const Context& context) {
  const Ends ends(p.groups);
  const GroupedMatrix x{.rows = p.x};
  std::vector<ColumnSumProblem> problems;
  for (size_t e = 0; e < ends.size(); ++e) {
    const auto row = static_cast<int64_t>(e) * p.out.row_stride * size_of(p.out.dtype);
    problems.push_back({.x = matrix_of(x, ends, e),
                        .out = p.out.data ? static_cast<char*>(p.out.data) + row : nullptr,
                        .out_dtype = p.out.dtype});
  }
  check_each(problems);
  run_each(problems, context);
}

void grouped_activation(const GroupedActivationProblem& p, const Context& context) {
  const Ends ends(p.groups);
  const GroupedLayout rowwise{p.spec, Direction::rowwise, ends, p.y.cols, "activation"},
      columnwise{p.spec, Direction::columnwise, ends, p.y.cols, "activation"};
  const std::vector<Side> rows = wanted_sides(p.rowwise, rowwise), columns = wanted_sides(p.columnwise, columnwise);
  const GroupedMatrix x{.rows = p.x};
  const MutableGroupedMatrix y{.rows = p.y};
  std::vector<ActivationProblem> problems;
  for (size_t e = 0; e < ends.size(); ++e) {
    if (ends.rows(e) == 0) continue;
    problems.push_back({.activation = p.activation,
                        .x = matrix_of(x, ends, e),
                        .out = {.y = matrix_of(y, ends, e),
                                .spec = p.spec,
                                .rowwise = at(rows, e),
                                .columnwise = at(columns, e),
                                .scale = at(p.scale, e)}});
  }
  check_each(problems);
  zero_beyond(p.y, ends);
  clear_unwritten(p.rowwise, rowwise);
  clear_unwritten(p.columnwise, columnwise);
  run_each(problems, context);
}

void grouped_fingerprint(const GroupedFingerprintProblem& p, const Context& context) {
  const Ends ends(p.groups);
  for (size_t e = 0; e < ends.size(); ++e)
    if (ends.rows(e) > 0)
      dispatch(FingerprintProblem{.x = p.x[e], .expected = p.expected + e, .what = p.what}, context);
}

}  // namespace quire::cpu
