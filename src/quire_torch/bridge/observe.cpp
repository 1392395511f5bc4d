#include "quire_torch/bridge/observe.h"

#include <c10/util/ThreadLocalDebugInfo.h>

#include <atomic>
#include <charconv>
#include <cmath>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "quire/base/check.h"
#include "quire/base/lazy.h"
#include "quire/base/process_mutex.h"
#include "quire/device/dispatch.h"
#include "quire/operations/operations.h"
#include "quire_torch/bridge/copies.h"
#include "quire_torch/bridge/records.h"
#include "quire_torch/bridge/role.h"

namespace quire_torch {
namespace {

using quire::Direction, quire::GemmProblem, quire::on_host, quire::QuantizeProblem;

/// PyTorch's threads that run backward passes (of a device they are not the thread that asks for one) have what the
/// asking thread has here.
struct Explanation final : c10::DebugInfoBase {
  quire::ProcessMutex mutex;
  std::string text;
  std::atomic<bool> ended{false};
};
constexpr std::string_view kName = "quire.explain";
/// Older versions of PyTorch have no kinds for others; of theirs, PyTorch itself never sets this one.
template <class Kind = c10::DebugInfoKind>
Kind kind() {
  if constexpr (std::is_enum_v<Kind>)
    return Kind::TEST_INFO_2;
  else
    return Kind(&kName);
}

/// What this thread, and the backward passes that it asks for, write.
Explanation* explanation() {
  auto* const found = static_cast<Explanation*>(c10::ThreadLocalDebugInfo::get(kind()));
  return found && !found->ended ? found : nullptr;
}
/// Of the thread that began one: PyTorch's entry for it.
thread_local std::shared_ptr<c10::ThreadLocalDebugInfo> explaining;

void write(Explanation& to, const std::string& text) {
  const std::lock_guard lock(to.mutex);
  to.text += text;
}

/// Reads back as the same number.
std::string decimal(double value) {
  char digits[32];
  return {digits, std::to_chars(digits, std::end(digits), value).ptr};
}

const char* name(Direction d) { return d == Direction::rowwise ? "rowwise" : "columnwise"; }

/// Adds a problem that has run to this thread's explanation, if there is one. name: "OPERATION\tNAME".
template <class Problem>
void explain_step(const std::string& name, const Problem& p, const std::string& operands,
                  const quire::Context& context) {
  Explanation* const to = explanation();
  if (!to) return;
  std::string step = quire::text("step ", name, "\t", to_string(p), "\n", operands);
  const std::string rows = quire::explain_choice(p, context);
  for (size_t begin = 0, end = 0; (end = rows.find('\n', begin)) != std::string::npos; begin = end + 1)
    step += "kernel " + rows.substr(begin, end + 1 - begin);
  write(*to, step);
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

/// The layer for which this thread computes, as counting_for() has said since counting began, or "".
struct Layer {
  std::string name;
  uint64_t began = 0;  ///< how often counting had begun then
};
thread_local Layer of_thread;

struct Count {
  int64_t tensors = 0;
  quire::Statistics of{};

  Count& operator+=(const Count& more) {
    tensors += more.tensors;
    of += more.of;
    return *this;
  }
};

struct Counts {
  using Key = std::tuple<std::string, std::string, std::string, Direction>;  ///< layer, role, spec, direction

  std::atomic<bool> on{false};
  std::atomic<uint64_t> began{0};
  quire::ProcessMutex mutex;
  std::map<Key, Count> by_operand;
  /// Operands without a role, by the memory of their codes, until a product reads them.
  std::map<const void*, std::pair<Key, Count>> unclaimed;

  std::string layer() const { return of_thread.began == began ? of_thread.name : std::string(); }
  void add(const char* role, const std::string& spec, Direction d, const Count& count, const void* codes) {
    const std::lock_guard lock(mutex);
    settle(codes);
    const Key key{layer(), role, spec, d};
    if (*role != '\0')
      by_operand[key] += count;
    else
      unclaimed[codes] = {key, count};
  }
  void claim(const char* role, const quire::Operand& read) {
    const std::lock_guard lock(mutex);
    const auto found = unclaimed.find(read.data);
    // More than was quantized there: the memory has been used again, for codes of other ranks.
    if (found == unclaimed.end() || read.outer * read.contraction > found->second.second.of.elements) return;
    std::get<1>(found->second.first) = role;
    settle(read.data);
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
  static constinit quire::Lazy<Counts> one;
  return one.get();
}

bool counting() { return counts().on.load(std::memory_order_relaxed); }

/// Counts what was quantized; returns it as lines of an explanation. If counting began after a producer did, nobody has
/// asked that one for the values, and it is not counted.
std::string observe_sides(const char* role, const QuantizeProblem& p, const quire::Context& context) {
  if (p.in_groups()) return {};  // whose sizes only kernels know
  const bool kept = p.x.data != nullptr || p.x.rows * p.x.cols == 0;
  const bool count = counting() && kept && !context.capturing;
  // What runs later is waited for: to count is slow in any case.
  std::optional<HostCopy> copy;
  if (count && !on_host(context)) copy.emplace(p, context);
  if (recording()) record_quantized(role, p, context);
  std::string operands;
  for (const Direction d : {Direction::rowwise, Direction::columnwise}) {
    if ((d == Direction::rowwise ? p.rowwise : p.columnwise).data == nullptr) continue;
    const quire::Operand o = operand_of(p, d);
    operands += operand_line(role, o);
    if (count) counts().add(role, p.spec.to_string(), d, {1, quire::statistics(copy ? copy->problem() : p, d)}, o.data);
  }
  return operands;
}

class Listener final : public quire::Observer {
 public:
  bool reads_values() const override { return counting(); }
  void ran(const quire::AnyProblem& problem, const quire::Context& context) override {
    std::visit(
        [&](const auto* p) {
          // The host's kernels tell of each group by itself.
          if constexpr (requires { p->in_groups(); })
            if (p->in_groups() && on_host(context)) return;
          heard(*p, context);
        },
        problem);
  }

 private:
  static void heard(const QuantizeProblem& p, const quire::Context& context) {
    const char* const role = NamedRole::of(p.role);
    explain_step(quire::text("quantize\t", role), p, observe_sides(role, p, context), context);
  }
  static void heard(const GemmProblem& p, const quire::Context& context) {
    const std::string_view part = context.part;
    const std::string operands = p.in_groups() ? "" : operand_line(p.role.a, p.a) + operand_line(p.role.b, p.b);
    explain_step(quire::text("gemm\t", part, part.empty() ? "" : " ", p.role.name), p, operands, context);
    for (const auto& [role, operand] : {std::pair{p.role.a, &p.a}, std::pair{p.role.b, &p.b}}) {
      if (counting()) counts().claim(role, *operand);
      if (recording()) record_read(role, operand->data);
    }
  }
  /// Operands that a norm or an activation quantizes have no role yet.
  static void heard(const quire::NormProblem& p, const quire::Context& context) {
    explain_step(quire::text(p.kOp, "\t"), p, observe_sides("", p.out.quantization(), context), context);
  }
  static void heard(const quire::ActivationProblem& p, const quire::Context& context) {
    const std::string operands = p.in_groups() ? "" : observe_sides("", p.out.quantization(), context);
    explain_step(quire::text(p.kOp, "\t"), p, operands, context);
  }
  static void heard(const quire::ColumnSumProblem& p, const quire::Context& context) {
    explain_step("column_sum\tdbias", p, "", context);
  }
  static void heard(const quire::AmaxProblem& p, const quire::Context& context) {
    explain_step("amax\t", p, "", context);
  }
  static void heard(const quire::MatmulProblem& p, const quire::Context& context) {
    explain_step("matmul\t", p, "", context);
  }
  static void heard(const quire::DequantizeProblem& p, const quire::Context& context) {
    explain_step("dequantize\t", p, "", context);
  }
  static void heard(const quire::NormGradProblem& p, const quire::Context& context) {
    explain_step("norm\tgrad", p, "", context);
  }
  static void heard(const quire::ActivationGradProblem& p, const quire::Context& context) {
    explain_step("activation\tgrad", p, "", context);
  }
  /// What is no part of an explanation: states, routes, rows that move.
  template <class Problem>
  static void heard(const Problem&, const quire::Context&) {}
};

}  // namespace

quire::Observer* listener() {
  static constinit quire::Lazy<Listener> one;
  return &one.get();
}

void begin_explanation() {
  quire::check(!explanation(), "explain: this thread is inside quire.explain already; call it once at a time");
  c10::ThreadLocalDebugInfo::_push(kind(), std::make_shared<Explanation>());
  explaining = c10::ThreadLocalDebugInfo::current();
  ++observers;
}

void note_step(std::string step) {
  if (Explanation* const to = explanation()) write(*to, "step " + step + "\n");
}

std::string end_explanation() {
  Explanation* const written = explanation();
  if (!written || !explaining) return {};
  --observers;
  written->ended = true;
  std::string text = std::move(written->text);
  // A profiler that has begun since lies above the entry, which then stays below it and says nothing.
  if (c10::ThreadLocalDebugInfo::current() == explaining) c10::ThreadLocalDebugInfo::_pop(kind());
  explaining.reset();
  return text;
}

void set_counting(bool on) {
  Counts& c = counts();
  const std::lock_guard lock(c.mutex);
  if (on) {
    c.by_operand.clear();
    c.unclaimed.clear();
    ++c.began;
  }
  if (c.on.exchange(on) != on) observers += on ? 1 : -1;
}

void counting_for(std::string layer) { of_thread = {std::move(layer), counts().began}; }

void set_observing_operands(bool on) {
  if (set_recording(on)) observers += on ? 1 : -1;
}

std::string counted() {
  Counts& c = counts();
  const std::lock_guard lock(c.mutex);
  while (!c.unclaimed.empty()) c.settle(c.unclaimed.begin()->first);
  std::string lines;
  for (const auto& [key, count] : c.by_operand) {
    const auto& [layer, role, spec, direction] = key;
    const quire::Statistics& of = count.of;
    const double none = of.measured < of.elements && of.measured == 0 ? std::numeric_limits<double>::quiet_NaN() : 0.0;
    const double error = of.squares > 0 ? std::sqrt(of.errors / of.squares) : none;
    lines += quire::text(layer, "\t", role, "\t", spec, "\t", name(direction), "\t", count.tensors, "\t", of.elements,
                         "\t", of.saturated, "\t", of.underflowed, "\t", of.nonfinite, "\t", decimal(of.amax), "\t",
                         decimal(error), "\n");
  }
  return lines;
}

}  // namespace quire_torch
