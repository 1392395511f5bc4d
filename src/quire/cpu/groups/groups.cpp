#include "quire/cpu/groups/groups.h"

#include <algorithm>
#include <memory_resource>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "quire/base/parallel.h"
#include "quire/cpu/groups/layout.h"
#include "quire/cpu/workspace.h"
#include "quire/device/dispatch.h"

namespace quire::cpu {
namespace {

int64_t cost_of(const QuantizeProblem& p) { return times(p.x.rows, p.x.cols); }
int64_t cost_of(const AmaxProblem& p) { return times(p.x.rows, p.x.cols); }
int64_t cost_of(const DequantizeProblem& p) { return times(p.rows, p.cols); }
int64_t cost_of(const ActivationProblem& p) { return times(p.x.rows, p.x.cols); }
int64_t cost_of(const ColumnSumProblem& p) { return times(p.x.rows, p.x.cols); }
/// A product of few rows takes as long as reading its columns.
int64_t cost_of(const GemmProblem& p) { return times(times(p.out.rows + 8, p.out.cols), p.a.contraction); }

/// What a thread of its own is worth, in the same units.
template <class Problem>
constexpr int64_t kWorthAThread = int64_t{1} << 15;
template <>
constexpr int64_t kWorthAThread<GemmProblem> = int64_t{1} << 21;  // 2^18 multiplications of one row

/// The problem of a group.
template <class Problem>
struct GroupCut {
  size_t group;
  Problem problem;
};

template <class Problem>
using GroupCuts = std::pmr::vector<GroupCut<Problem>>;

/// Room for a problem of each group that has rows.
template <class Problem>
GroupCuts<Problem> cuts_of(const Ends& ends, ListMemory& memory) {
  GroupCuts<Problem> cuts(memory);
  cuts.reserve(ends.filled());
  return cuts;
}

template <class Problem>
void check_each(const GroupCuts<Problem>& cuts) {
  for (const GroupCut<Problem>& cut : cuts) check_problem(cut.problem);
}

template <class Problem>
void run_one(const GroupCut<Problem>& cut, Context context) {
  std::string part;
  if (context.observer && !context.part.empty()) context.part = part = text(context.part, " ", cut.group);
  run_checked(cut.problem, context);
}

template <class Problem>
void run_each(const GroupCuts<Problem>& cuts, const Context& context) {
  std::pmr::vector<int64_t> costs(cuts.get_allocator().resource());
  costs.reserve(cuts.size());
  for (const GroupCut<Problem>& cut : cuts) costs.push_back(cost_of(cut.problem));
  // Observers hear of the groups in order, and in the thread that asked.
  if (context.observer || std::accumulate(costs.begin(), costs.end(), int64_t{0}) < 2 * kWorthAThread<Problem>)
    for (const GroupCut<Problem>& cut : cuts) run_one(cut, context);
  else
    parallel_tasks(costs, [&](size_t i) { run_one(cuts[i], context); });
}

/// The group's number of one for each.
template <class Number>
Number* at(Number* numbers, size_t group) {
  return numbers ? numbers + group : nullptr;
}

/// The group's one of biases of `cols` elements.
Vector at(const Vector& all, std::span<const Vector> each, size_t group, int64_t cols) {
  if (!each.empty()) return each[group];
  const int64_t first = static_cast<int64_t>(group) * cols * size_of(all.dtype);
  return {all.data ? static_cast<const char*>(all.data) + first : nullptr, all.dtype};
}

/// The group's one of matrices of `rows` rows, one after another or in a list.
template <class AnyMatrix>
AnyMatrix equal_part(const AnyMatrix& all, std::span<const AnyMatrix> each, size_t group, int64_t rows) {
  return matrix_of(all, each, group, {static_cast<int64_t>(group) * rows, rows});
}

/// Zeros of a product: rows that belong to no group; or the products, each of which out_of() gives, of groups that have
/// no rows.
template <class OutOf>
void zero_unwritten(const MutableMatrix& out, bool by_rows, const Ends& ends, const OutOf& out_of) {
  if (by_rows) return zero_beyond(out, ends);
  for (size_t e = 0; e < ends.size(); ++e)
    if (ends.rows(e) == 0) zero(out_of(e));
}

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

/// Flat sides that are results, cut into those of groups.
class CutSides {
 public:
  CutSides(const GroupedLayout& rowwise, bool one, ListMemory& memory)
      : one_(one), memory_(memory), rowwise_(rowwise), columnwise_(rowwise), rows_(none()), columns_(none()) {
    columnwise_.direction = Direction::columnwise;
  }

  /// Throws Error if they are too small.
  void cut(const Side& rowwise, const Side& columnwise, const Room& room) {
    rows_ = sides({rowwise, room.rowwise}, rowwise_), columns_ = sides({columnwise, room.columnwise}, columnwise_);
  }
  Side rowwise(size_t group) const { return rows_.sides.empty() ? Side{} : rows_.sides[group]; }
  Side columnwise(size_t group) const { return columns_.sides.empty() ? Side{} : columns_.sides[group]; }
  GivenAmax amax(const GivenAmax& all, size_t group) const {
    return {.rowwise = amaxes_of(all.rowwise, rowwise_, group),
            .columnwise = amaxes_of(all.columnwise, columnwise_, group)};
  }
  void clear_unwritten(const Side& rowwise, const Side& columnwise, const Room& room) const {
    cpu::clear_unwritten({rowwise, room.rowwise}, rowwise_.spec, rows_.taken);
    cpu::clear_unwritten({columnwise, room.columnwise}, rowwise_.spec, columns_.taken);
  }

 private:
  CutSide none() const { return {std::pmr::vector<Side>(memory_)}; }
  /// None where the direction is absent.
  CutSide sides(const FlatSide& side, const GroupedLayout& layout) const {
    if (!side.present()) return none();
    return one_ ? CutSide{{1u, side.memory, memory_}} : sides_of(side, layout, memory_);
  }

  bool one_;  ///< whose sides are no flat ones
  ListMemory& memory_;
  GroupedLayout rowwise_, columnwise_;
  CutSide rows_, columns_;
};

}  // namespace

void run_groups(const AmaxProblem& p, const Context& context) {
  ListMemory memory;
  const Ends ends(p.groups, p.x.rows, memory);
  const GroupedLayout rowwise{p.spec, Direction::rowwise, ends, p.x.cols, p.kOp},
      columnwise{p.spec, Direction::columnwise, ends, p.x.cols, p.kOp};
  GroupCuts<AmaxProblem> problems = cuts_of<AmaxProblem>(ends, memory);
  for (size_t e = 0; e < ends.size(); ++e)
    if (ends.rows(e) > 0)
      problems.push_back({e,
                          {.spec = p.spec,
                           .x = matrix_of(p.x, ends, e),
                           .rowwise = amaxes_of(p.rowwise, rowwise, e),
                           .columnwise = amaxes_of(p.columnwise, columnwise, e)}});
  check_each(problems);
  const GroupSizes<int64_t> sizes{p.x.rows, p.x.cols, p.groups.count};
  clear(p.rowwise, grouped_amax_count(p.spec, sizes, Direction::rowwise));
  clear(p.columnwise, grouped_amax_count(p.spec, sizes, Direction::columnwise));
  run_each(problems, context);
}

void run_groups(const QuantizeProblem& p, const Context& context) {
  ListMemory memory;
  const Ends ends(p.groups, p.x.rows, memory);
  const std::optional<Ends> only = p.only.ends.data ? std::optional<Ends>({p.only, p.only.rows, memory}) : std::nullopt;
  CutSides sides({p.spec, Direction::rowwise, ends, p.x.cols, p.what}, is_one(p.groups), memory);
  sides.cut(p.rowwise, p.columnwise, p.room);
  GroupCuts<QuantizeProblem> problems = cuts_of<QuantizeProblem>(ends, memory);
  for (size_t e = 0; e < ends.size(); ++e) {
    if (ends.rows(e) == 0 || (only && only->rows(e) == 0)) continue;
    Randomness random = p.random;
    random.seed += e;
    problems.push_back({e,
                        {.spec = p.spec,
                         .x = matrix_of(p.x, p.each, e, {ends.begin(e), ends.rows(e)}),
                         .rowwise = sides.rowwise(e),
                         .columnwise = sides.columnwise(e),
                         .random = random,
                         .scale = at(p.scale, e),
                         .amax = sides.amax(p.amax, e),
                         .role = p.role}});
  }
  check_each(problems);
  sides.clear_unwritten(p.rowwise, p.columnwise, p.room);
  run_each(problems, context);
}

void run_groups(const DequantizeProblem& p, const Context& context) {
  const Operand from{.spec = p.spec,
                     .outer = p.rows,
                     .contraction = p.cols,
                     .data = p.data,
                     .scale = p.scale,
                     .amax = p.amax,
                     .groups = p.groups,
                     .room = p.room,
                     .what = p.what};
  ListMemory memory;
  const CutOperand cut(from, memory);
  GroupCuts<DequantizeProblem> problems = cuts_of<DequantizeProblem>(cut.ends(), memory);
  for (size_t e = 0; e < cut.ends().size(); ++e)
    if (cut.ends().rows(e) > 0) problems.push_back({e, cut.decoded(e, matrix_of(p.out, cut.ends(), e))});
  check_each(problems);
  zero_beyond(p.out, cut.ends());
  run_each(problems, context);
}

void run_groups(const GemmProblem& p, const Context& context) {
  ListMemory memory;
  const CutOperand a(p.a, memory), b(p.b, memory);
  const bool rows = p.a.direction == Direction::rowwise;
  const auto out_of = [&](size_t e) {
    return rows ? matrix_of(p.out, p.outs, e, {a.ends().begin(e), a.ends().rows(e)})
                : equal_part(p.out, p.outs, e, p.a.outer);
  };
  GroupCuts<GemmProblem> problems = cuts_of<GemmProblem>(a.ends(), memory);
  for (size_t e = 0; e < a.ends().size(); ++e) {
    if (a.ends().rows(e) == 0) continue;
    const MutableMatrix out = out_of(e);
    const Vector bias = at({p.bias, p.bias_dtype}, p.biases, e, p.out.cols);
    problems.push_back({e,
                        {.a = a[e],
                         .b = b[e],
                         .out = out,
                         .bias = bias.data,
                         .bias_dtype = bias.dtype,
                         .addend = p.addend ? out.data : nullptr,
                         .role = p.role}});
  }
  check_each(problems);
  if (!p.addend) zero_unwritten(p.out, rows, a.ends(), out_of);
  run_each(problems, context);
}

void run_groups(const MatmulProblem& p, const Context& context) {
  ListMemory memory;
  const Ends ends(p.groups, p.a.rows, memory);
  const int64_t count = p.groups.count;
  std::optional<CutOperand> codes;
  if (p.codes) codes.emplace(*p.codes, memory);
  const int64_t rows = codes ? codes->ends().rows(0) : 0, cols = codes ? p.codes->cols() : 0;
  const WorkspaceSpan<char> values(context, times(times(rows, cols), size_of(p.out.dtype)));
  const MutableMatrix decoded{std::span<char>(values).data(), p.out.dtype, rows, cols, cols};
  const auto b_of = [&](size_t e) {
    return p.transpose_a ? matrix_of(p.b, p.bs, e, {ends.begin(e), ends.rows(e)})
                         : equal_part(p.b, p.bs, e, p.b.rows / count);
  };
  const auto out_of = [&](size_t e) {
    return p.transpose_a ? equal_part(p.out, p.outs, e, p.a.cols)
                         : matrix_of(p.out, p.outs, e, {ends.begin(e), ends.rows(e)});
  };
  GroupCuts<DequantizeProblem> decodings(memory);
  GroupCuts<MatmulProblem> products = cuts_of<MatmulProblem>(ends, memory);
  if (codes) decodings.reserve(ends.filled());
  for (size_t e = 0; e < ends.size(); ++e) {
    if (ends.rows(e) == 0) continue;
    if (codes) decodings.push_back({e, codes->decoded(e, decoded)});
    products.push_back({e,
                        {.a = matrix_of(p.a, ends, e),
                         .b = codes ? Matrix(decoded) : b_of(e),
                         .transpose_a = p.transpose_a,
                         .transpose_b = p.transpose_b,
                         .bias = at(p.bias, p.biases, e, p.out.cols),
                         .out = out_of(e)}});
  }
  check_each(decodings);
  check_each(products);
  zero_unwritten(p.out, !p.transpose_a, ends, out_of);
  // One after the other: the library that multiplies has threads of its own, and one matrix is decoded at a time.
  for (size_t i = 0; i < products.size(); ++i) {
    if (codes) run_one(decodings[i], context);
    run_one(products[i], context);
  }
}

void run_groups(const ColumnSumProblem& p, const Context& context) {
  ListMemory memory;
  const Ends ends(p.groups, p.x.rows, memory);
  GroupCuts<ColumnSumProblem> problems = cuts_of<ColumnSumProblem>(ends, memory);
  for (size_t e = 0; e < ends.size(); ++e) {
    const auto row = static_cast<int64_t>(e) * p.x.cols * size_of(p.out_dtype);
    problems.push_back({e,
                        {.x = matrix_of(p.x, ends, e),
                         .out = p.out ? static_cast<char*>(p.out) + row : nullptr,
                         .out_dtype = p.out_dtype}});
  }
  check_each(problems);
  run_each(problems, context);
}

void run_groups(const ActivationProblem& p, const Context& context) {
  const Destination& out = p.out;
  ListMemory memory;
  const Ends ends(p.groups, p.x.rows, memory);
  CutSides sides({out.spec, Direction::rowwise, ends, out.y.cols, p.kOp}, is_one(p.groups), memory);
  sides.cut(out.rowwise, out.columnwise, p.room);
  GroupCuts<ActivationProblem> problems = cuts_of<ActivationProblem>(ends, memory);
  for (size_t e = 0; e < ends.size(); ++e) {
    if (ends.rows(e) == 0) continue;
    problems.push_back({e,
                        {.activation = p.activation,
                         .x = matrix_of(p.x, ends, e),
                         .out = {.y = matrix_of(out.y, ends, e),
                                 .spec = out.spec,
                                 .rowwise = sides.rowwise(e),
                                 .columnwise = sides.columnwise(e),
                                 .scale = at(out.scale, e),
                                 .amax = sides.amax(out.amax, e)}}});
  }
  check_each(problems);
  zero_beyond(out.y, ends);
  sides.clear_unwritten(out.rowwise, out.columnwise, p.room);
  run_each(problems, context);
}

// One problem of the rows of all groups, which lie one after another: no element needs to know its group.
void run_groups(const ActivationGradProblem& p, const Context& context) {
  ListMemory memory;
  const Ends ends(p.groups, p.x.rows, memory);
  zero_beyond(p.dx, ends);
  ActivationGradProblem of_all = p;
  of_all.groups = {};
  of_all.dy.rows = of_all.x.rows = of_all.dx.rows = ends.end();
  run_checked(of_all, context);
}

void run_groups(const FingerprintProblem& p, const Context& context) {
  ListMemory memory;
  const Ends ends(p.groups, p.x.rows, memory);
  const std::optional<Ends> only = p.only.ends.data ? std::optional<Ends>({p.only, p.only.rows, memory}) : std::nullopt;
  for (size_t e = 0; e < ends.size(); ++e)
    if (!only || only->rows(e) > 0)
      dispatch(FingerprintProblem{.x = matrix_of(p.x, p.each, e, {ends.begin(e), ends.rows(e)}),
                                  .to = at(p.to, e),
                                  .expected = at(p.expected, e),
                                  .what = p.what},
               context);
}

}  // namespace quire::cpu
