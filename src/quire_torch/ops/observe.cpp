#include "quire_torch/ops/observe.h"

#include <atomic>
#include <map>
#include <mutex>
#include <optional>
#include <tuple>
#include <vector>

#include "quire/base/check.h"
#include "quire/gemm/gemm.h"
#include "quire/gemm/kernels.h"
#include "quire/pointwise/pointwise.h"
#include "quire/quantize/quantize.h"
#include "quire/quantize/statistics.h"

namespace quire_torch {
namespace {

using quire::Direction, quire::GemmProblem, quire::QuantizeProblem;

/// Explanations being written, and one for counting.
std::atomic<int> observers{0};
bool observed() { return observers.load(std::memory_order_relaxed) != 0; }

thread_local std::optional<std::string> explanation;

const char* name(Direction d) { return d == Direction::rowwise ? "rowwise" : "columnwise"; }

template <class Problem>
void explain_step(const char* operation, const char* name, const Problem& p, const std::string& operands) {
  *explanation += quire::text("step ", operation, "\t", name, "\t", to_string(p), "\n", operands);
  const std::string rows = quire::explain(p);
  for (size_t begin = 0, end = 0; (end = rows.find('\n', begin)) != std::string::npos; begin = end + 1)
    *explanation += "kernel " + rows.substr(begin, end + 1 - begin);
}

std::string operand_line(const char* role, const quire::Operand& o) {
  return quire::text("operand ", role, "\t", o.spec.to_string(), "\t", name(o.direction), "\t", o.outer, "\t",
                     o.contraction, "\t", o.data, "\n");
}

quire::Operand operand_of(const QuantizeProblem& p, Direction d) {
  const bool rowwise = d == Direction::rowwise;
  return {.spec = p.spec,
          .direction = d,
          .outer = rowwise ? p.x.rows : p.x.cols,
          .contraction = rowwise ? p.x.cols : quire::columnwise_tokens(p.spec, p.x.rows),
          .data = (rowwise ? p.rowwise : p.columnwise).data};
}

struct Count {
  int64_t tensors = 0;
  quire::Statistics of{};

  Count& operator+=(const Count& more) {
    tensors += more.tensors;
    of.elements += more.of.elements;
    of.saturated += more.of.saturated;
    of.underflowed += more.of.underflowed;
    of.nonfinite += more.of.nonfinite;
    return *this;
  }
};

struct Counts {
  using Key = std::tuple<std::string, std::string, Direction>;  ///< role, spec, direction

  std::atomic<bool> on{false};
  std::mutex mutex;
  std::map<Key, Count> by_operand;
  /// Operands without a role, by the memory of their codes, until a product reads them.
  std::map<const void*, std::pair<Key, Count>> unclaimed;

  void add(const char* role, const std::string& spec, Direction d, const Count& count, const void* codes) {
    const std::lock_guard lock(mutex);
    settle(codes);
    if (*role != '\0')
      by_operand[{role, spec, d}] += count;
    else
      unclaimed[codes] = {Key{role, spec, d}, count};
  }
  void claim(const char* role, const void* codes) {
    const std::lock_guard lock(mutex);
    const auto found = unclaimed.find(codes);
    if (found == unclaimed.end()) return;
    std::get<0>(found->second.first) = role;
    settle(codes);
  }
  /// The codes have been overwritten, or found their role.
  void settle(const void* codes) {
    const auto found = unclaimed.find(codes);
    if (found == unclaimed.end()) return;
    by_operand[found->second.first] += found->second.second;
    unclaimed.erase(found);
  }
};

Counts& counts() {
  static Counts c;
  return c;
}

bool counting() { return counts().on.load(std::memory_order_relaxed); }

/// Counts what was quantized; returns it as lines of an explanation.
std::string observe_sides(const char* role, const QuantizeProblem& p) {
  std::string operands;
  for (const Direction d : {Direction::rowwise, Direction::columnwise}) {
    if ((d == Direction::rowwise ? p.rowwise : p.columnwise).data == nullptr) continue;
    const quire::Operand o = operand_of(p, d);
    operands += operand_line(role, o);
    if (counting()) counts().add(role, p.spec.to_string(), d, {1, quire::statistics(p, d)}, o.data);
  }
  return operands;
}

void observe(const char* role, const QuantizeProblem& p) {
  const std::string operands = observe_sides(role, p);
  if (explanation) explain_step("quantize", role, p, operands);
}

/// What has quantized its result.
template <class Problem>
void observe_producer(const char* operation, const Problem& p) {
  const std::string operands = observe_sides("", p.out.quantization());
  if (explanation) explain_step(operation, "", p, operands);
}

/// A problem whose result may be quantized. Counting needs the result itself, also where nobody else does.
template <class Problem>
void run_producer(const char* operation, Problem problem, void (*compute)(const Problem&)) {
  quire::MutableMatrix& y = problem.out.y;
  std::vector<char> memory;
  if (observed() && counting() && y.data == nullptr) {
    memory.resize(static_cast<size_t>(y.rows * y.cols * size_of(y.dtype)));
    y.data = memory.data();
  }
  compute(problem);
  if (observed()) [[unlikely]]
    observe_producer(operation, problem);
}

void observe(const Product& product, const GemmProblem& p) {
  if (explanation) explain_step("gemm", product.name, p, operand_line(product.a, p.a) + operand_line(product.b, p.b));
  if (!counting()) return;
  counts().claim(product.a, p.a.data);
  counts().claim(product.b, p.b.data);
}

/// Passes on what runners do.
class Listener final : public quire::RunnerObserver {
 public:
  void quantized(const std::string&, const QuantizeProblem& p) override { observe("x", p); }
  void multiplied(const std::string& part, const char* product, const GemmProblem& p) override {
    const std::string name = part.empty() ? product : part + " " + product;
    observe({.name = name.c_str(), .a = "x", .b = "w"}, p);
  }
  void activated(const std::string&, const quire::ActivationProblem& p) override { observe_producer("activation", p); }
};

}  // namespace

quire::RunnerObserver* runner_observer() {
  static Listener listener;
  return observed() ? &listener : nullptr;
}

void run(const char* role, const QuantizeProblem& problem) {
  quire::quantize(problem);
  if (observed()) [[unlikely]]
    observe(role, problem);
}

void run(const char* role, std::span<const QuantizeProblem> problems) {
  quire::quantize_each(problems);
  if (observed()) [[unlikely]]
    for (const QuantizeProblem& p : problems) observe(role, p);
}

void run(const quire::DequantizeProblem& problem) {
  quire::dequantize(problem);
  if (observed() && explanation) [[unlikely]]
    explain_step("dequantize", "", problem, "");
}

void run(const Product& product, const GemmProblem& problem) {
  quire::gemm(problem);
  if (observed()) [[unlikely]]
    observe(product, problem);
}

void run(const Product& product, std::span<const GemmProblem> problems) {
  quire::gemm_each(problems);
  if (observed()) [[unlikely]]
    for (const GemmProblem& p : problems) observe(product, p);
}

void run(const quire::ColumnSumProblem& problem) {
  quire::column_sum(problem);
  if (observed() && explanation) [[unlikely]]
    explain_step("column_sum", "dbias", problem, "");
}

void run(const quire::NormProblem& problem) { run_producer("norm", problem, quire::norm); }

void run(const quire::NormGradProblem& problem) {
  quire::norm_grad(problem);
  if (observed() && explanation) [[unlikely]]
    explain_step("norm", "grad", problem, "");
}

void run(const quire::ActivationProblem& problem) { run_producer("activation", problem, quire::activation); }

void run(std::span<const quire::ActivationProblem> problems) {
  if (!observed()) [[likely]]
    return quire::activation_each(problems);
  for (const quire::ActivationProblem& p : problems) run(p);
}

void run(const quire::ActivationGradProblem& problem) {
  quire::activation_grad(problem);
  if (observed() && explanation) [[unlikely]]
    explain_step("activation", "grad", problem, "");
}

void begin_explanation() {
  quire::check(!explanation, "explain: this thread is inside quire.explain already; call it once at a time");
  explanation.emplace();
  ++observers;
}

void note_step(std::string step) {
  if (explanation) *explanation += "step " + step + "\n";
}

std::string end_explanation() {
  if (!explanation) return {};
  --observers;
  std::string text = std::move(*explanation);
  explanation.reset();
  return text;
}

void set_counting(bool on) {
  Counts& c = counts();
  const std::lock_guard lock(c.mutex);
  if (on) {
    c.by_operand.clear();
    c.unclaimed.clear();
  }
  if (c.on.exchange(on) != on) observers += on ? 1 : -1;
}

std::string counted() {
  Counts& c = counts();
  const std::lock_guard lock(c.mutex);
  while (!c.unclaimed.empty()) c.settle(c.unclaimed.begin()->first);
  std::string lines;
  for (const auto& [key, count] : c.by_operand) {
    const auto& [role, spec, direction] = key;
    lines += quire::text(role, "\t", spec, "\t", name(direction), "\t", count.tensors, "\t", count.of.elements, "\t",
                         count.of.saturated, "\t", count.of.underflowed, "\t", count.of.nonfinite, "\n");
  }
  return lines;
}

}  // namespace quire_torch
