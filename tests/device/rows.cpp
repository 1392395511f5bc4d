// quire on the device: for each kernel that the host has, one of the same name, which checks the pointers of a problem,
// translates them and launches the host's. What such a kernel finds in memory (a stale fingerprint) is raised when
// somebody waits for it.
#include <torch/library.h>

#include <array>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "quire/device/device.h"
#include "quire_torch/library.h"

namespace testdevice {
namespace {

/// Lists of a problem, which lie on the host and may be gone when the kernel runs.
using Lists = std::vector<std::shared_ptr<void>>;

/// Calls itself with every pointer of a problem, and puts in its place where the kernel finds that memory.
class Translator {
 public:
  Translator(Launch& launch, Lists& lists) : launch_(launch), lists_(lists) {}

  template <class... Parts>
  void operator()(Parts&... parts) {
    (translate(parts), ...);
  }

 private:
  template <class T>
  void translate(T*& p) {
    p = launch_(p);
  }
  void translate(quire::Matrix& m) { translate(m.data); }
  void translate(quire::MutableMatrix& m) { translate(m.data); }
  void translate(quire::Vector& v) { translate(v.data); }
  void translate(quire::Integers& i) { translate(i.data); }
  void translate(quire::RowMap& m) { translate(m.rows); }
  void translate(quire::Side& s) { (*this)(s.data, s.scale, s.amax); }
  void translate(quire::Operand& o) { (*this)(o.data, o.scale, o.amax); }
  void translate(quire::GivenAmax& a) { (*this)(a.rowwise, a.columnwise); }
  void translate(quire::Destination& d) { (*this)(d.y, d.rowwise, d.columnwise, d.scale, d.amax); }
  void translate(quire::DelayedState& s) { (*this)(s.history, s.scale, s.amax, s.reduced, s.usage); }
  void translate(quire::RowGroups& g) { translate(g.ends); }
  void translate(quire::GroupedMatrix& m) { (*this)(m.rows, m.each); }
  void translate(quire::MutableGroupedMatrix& m) { (*this)(m.rows, m.each); }
  void translate(quire::GroupedSide& s) { (*this)(s.flat, s.each); }
  void translate(quire::GroupedOperand& o) { (*this)(o.groups, o.side); }
  template <class T>
  void translate(std::span<const T>& list) {
    const auto copy = std::make_shared<std::vector<T>>(list.begin(), list.end());
    for (T& one : *copy) translate(one);
    list = *copy;
    lists_.push_back(copy);
  }

  Launch& launch_;
  Lists& lists_;
};

/// A problem that outlives the call: what it points to on the host is copied.
template <class Problem>
struct Kept {
  explicit Kept(const Problem& given) : problem(given) {}
  Kept(const Kept&) = delete;
  Problem problem;
  Lists lists;
};
template <>
struct Kept<quire::FingerprintProblem> {
  explicit Kept(const quire::FingerprintProblem& given) : problem(given), what(given.what) { problem.what = what; }
  Kept(const Kept&) = delete;
  quire::FingerprintProblem problem;
  Lists lists;
  std::string what;
};
void translate(Translator to, Kept<quire::QuantizeProblem>& k) {
  auto& p = k.problem;
  to(p.x, p.rowwise, p.columnwise, p.random.state, p.scale, p.amax);
}
void translate(Translator to, Kept<quire::AmaxProblem>& k) { to(k.problem.x, k.problem.rowwise, k.problem.columnwise); }
void translate(Translator to, Kept<quire::DequantizeProblem>& k) {
  to(k.problem.data, k.problem.scale, k.problem.amax, k.problem.out);
}
void translate(Translator to, Kept<quire::ReorderProblem>& k) { to(k.problem.from, k.problem.data, k.problem.scale); }
void translate(Translator to, Kept<quire::GemmProblem>& k) {
  auto& p = k.problem;
  to(p.a, p.b, p.out, p.bias, p.addend);
}
void translate(Translator to, Kept<quire::ColumnSumProblem>& k) { to(k.problem.x, k.problem.out); }
void translate(Translator to, Kept<quire::NormProblem>& k) {
  auto& p = k.problem;
  to(p.x, p.gamma, p.beta, p.out, p.mean, p.rstd);
}
void translate(Translator to, Kept<quire::NormGradProblem>& k) {
  auto& p = k.problem;
  to(p.dy, p.x, p.gamma, p.mean, p.rstd, p.dx, p.dgamma, p.dbeta);
}
void translate(Translator to, Kept<quire::ActivationProblem>& k) { to(k.problem.x, k.problem.out); }
void translate(Translator to, Kept<quire::ActivationGradProblem>& k) { to(k.problem.dy, k.problem.x, k.problem.dx); }
void translate(Translator to, Kept<quire::RouteProblem>& k) {
  to(k.problem.logits, k.problem.bias, k.problem.weights, k.problem.ids);
}
void translate(Translator to, Kept<quire::RouteGradProblem>& k) {
  to(k.problem.logits, k.problem.ids, k.problem.dweights, k.problem.dlogits);
}
void translate(Translator to, Kept<quire::CapacityProblem>& k) { to(k.problem.ids, k.problem.kept); }
void translate(Translator to, Kept<quire::PermuteProblem>& k) {
  to(k.problem.from, k.problem.map, k.problem.weights, k.problem.to);
}
void translate(Translator to, Kept<quire::UnpermuteProblem>& k) {
  to(k.problem.from, k.problem.map, k.problem.weights, k.problem.to);
}
void translate(Translator to, Kept<quire::PermutedDotProblem>& k) {
  to(k.problem.permuted, k.problem.tokens, k.problem.map, k.problem.to);
}
void translate(Translator to, Kept<quire::ExpertRowsProblem>& k) {
  to(k.problem.ids, k.problem.row_map, k.problem.offsets);
}
void translate(Translator to, Kept<quire::ChunkRowsProblem>& k) {
  to(k.problem.sizes, k.problem.order, k.problem.row_map);
}
void translate(Translator to, Kept<quire::FingerprintProblem>& k) { to(k.problem.x, k.problem.to, k.problem.expected); }
void translate(Translator to, Kept<quire::AdvanceProblem>& k) { to(k.problem.value); }
void translate(Translator to, Kept<quire::MaximumProblem>& k) { to(k.problem.to, k.problem.values); }
void translate(Translator to, Kept<quire::CollectProblem>& k) {
  auto& p = k.problem;
  to(p.amax, p.of_x, p.of_w, p.number, p.rule);
}
void translate(Translator to, Kept<quire::DelayedUpdateProblem>& k) { to(k.problem.states, k.problem.rules); }
void translate(Translator to, Kept<quire::GroupedQuantizeProblem>& k) {
  auto& p = k.problem;
  to(p.x, p.groups, p.rowwise, p.columnwise, p.random.state, p.scale, p.amax, p.only);
}
void translate(Translator to, Kept<quire::GroupedAmaxProblem>& k) {
  auto& p = k.problem;
  to(p.x, p.groups, p.rowwise, p.columnwise);
}
void translate(Translator to, Kept<quire::GroupedDequantizeProblem>& k) { to(k.problem.from, k.problem.out); }
void translate(Translator to, Kept<quire::GroupedGemmProblem>& k) {
  to(k.problem.a, k.problem.b, k.problem.out, k.problem.bias);
}
void translate(Translator to, Kept<quire::MatmulProblem>& k) {
  to(k.problem.a, k.problem.b, k.problem.bias, k.problem.out);
}
void translate(Translator to, Kept<quire::GroupedMatmulProblem>& k) {
  auto& p = k.problem;
  to(p.groups, p.a, p.b, p.codes, p.bias, p.out);
}
void translate(Translator to, Kept<quire::GroupedColumnSumProblem>& k) {
  to(k.problem.x, k.problem.groups, k.problem.out);
}
void translate(Translator to, Kept<quire::GroupedActivationProblem>& k) {
  auto& p = k.problem;
  to(p.x, p.groups, p.y, p.rowwise, p.columnwise, p.scale);
}
void translate(Translator to, Kept<quire::GroupedFingerprintProblem>& k) {
  to(k.problem.x, k.problem.groups, k.problem.expected);
}

template <class Problem>
const quire::KernelRow<Problem>& host_row(size_t number) {
  return quire::kernels<Problem>(quire::host())[number];
}

template <class Problem, size_t number>
bool refuses(const Problem& problem, const quire::Context&, quire::Refusal* refusal) {
  return !host_row<Problem>(number).takes(problem, quire::host(), refusal);
}

template <class Problem, size_t number>
void run(const Problem& problem, const quire::Context& context) {
  const quire::KernelRow<Problem>& row = host_row<Problem>(number);
  Launch launch(std::string(Problem::kOp),
                {context.index, static_cast<int64_t>(reinterpret_cast<uintptr_t>(context.stream))});
  const auto kept = std::make_shared<Kept<Problem>>(problem);
  translate(Translator(launch, kept->lists), *kept);
  std::move(launch).run([kept, &row] { row.run(kept->problem, quire::host()); });
}

constexpr size_t kMostRows = 8;

template <class Problem, size_t... numbers>
quire::KernelRows<Problem> make_rows(std::index_sequence<numbers...>) {
  static std::array<quire::KernelRow<Problem>, kMostRows> rows{
      quire::KernelRow<Problem>{"", refuses<Problem, numbers>, run<Problem, numbers>}...};
  const quire::KernelRows<Problem> host_rows = quire::kernels<Problem>(quire::host());
  quire::check(host_rows.size() <= kMostRows, "test device: raise kMostRows of rows.cpp to ", host_rows.size());
  for (size_t i = 0; i < host_rows.size(); ++i) rows[i].name = host_rows[i].name;
  return std::span(rows).first(host_rows.size());
}

template <class... Problems>
struct Rows {
  static quire::KernelTables make() { return {make_rows<Problems>(std::make_index_sequence<kMostRows>())...}; }
};

const bool registered = [] {
  static const quire::Device device{kName, quire::ForAllProblems<Rows>::make()};
  quire::register_device(device);
  return true;
}();

TORCH_LIBRARY_IMPL(quire, PrivateUse1, m) { quire_torch::implement_kernels(m, c10::DispatchKey::PrivateUse1); }

}  // namespace
}  // namespace testdevice
