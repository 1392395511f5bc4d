// quire on the device: for each kernel that the host has, one of the same name, which checks the pointers of a problem,
// translates them and launches the host's, with copies of its lists. A value that breaks a rule is written where a
// kernel on a GPU would write it, and raised by quire's next call or when somebody waits.
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <memory>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "cuda_rows.h"
#include "parts.h"
#include "quire/base/fault.h"
#include "quire/device/device.h"
#include "quire/device/library.h"
#include "quire_torch/bridge/context.h"
#include "quire_torch/library.h"

namespace testdevice {
namespace {

/// Puts in the place of every list of a problem one that is there for the launch alone.
class Lender {
 public:
  explicit Lender(HostLists& lists) : lists_(lists) {}

  template <class... Parts>
  void operator()(Parts&... parts) {
    (lend(parts), ...);
  }

 private:
  template <class T>
  void lend(std::span<const T>& list) {
    list = lists_.lend(list);
  }
  void lend(quire::Operand& o) { lend(o.each); }
  template <class T>
  void lend(std::optional<T>& one) {
    if (one) lend(*one);
  }
  template <class T>
  void lend(T&) {}

  HostLists& lists_;
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
  HostLists lists;
  Problem given = problem;
  parts(Lender(lists), given);
  Launch launch(std::string(Problem::kOp), place_of(context.index, context.stream));
  const auto kept = std::make_shared<Kept<Problem>>(given);
  parts(Translator(launch, kept->lists), kept->problem);
  std::move(launch).run([kept, &row, faults = context.faults] {
    try {
      row.run(kept->problem, quire::host());
    } catch (const quire::FaultError& e) {
      quire::report(*faults, e.operation, e.rule, e.fault);
    }
  });
}

/// The library computes on the device itself; groups, whose ends the host does not read, are launched.
void run_library(const quire::MatmulProblem& problem, const quire::Context& context) {
  if (problem.in_groups()) return run<quire::MatmulProblem, 0>(problem, context);
  quire::matmul_in_use()(problem, context);
}

/// Memory of the host that kernels write, as pinned memory is.
quire::FaultRecord* faults(int index) {
  static std::array<quire::FaultRecord, kDevices> all;
  return &all.at(static_cast<size_t>(index));
}

bool captures(int index, void* stream) { return capturing(place_of(index, stream)); }

constexpr size_t kMostRows = 8;

template <class Problem, size_t... numbers>
quire::KernelRows<Problem> make_rows(std::index_sequence<numbers...>) {
  static std::array<quire::KernelRow<Problem>, kMostRows> rows{
      quire::KernelRow<Problem>{"", refuses<Problem, numbers>, run<Problem, numbers>}...};
  const quire::KernelRows<Problem> host_rows = quire::kernels<Problem>(quire::host());
  quire::check(host_rows.size() <= kMostRows, "test device: raise kMostRows of rows.cpp to ", host_rows.size());
  for (size_t i = 0; i < host_rows.size(); ++i) rows[i].name = host_rows[i].name;
  if constexpr (std::is_same_v<Problem, quire::MatmulProblem>) rows[0].run = run_library;
  return std::span(rows).first(host_rows.size());
}

template <class... Problems>
struct Rows {
  static quire::KernelTables make() { return {make_rows<Problems>(std::make_index_sequence<kMostRows>())...}; }
};

/// The rows that QUIRE_TEST_DEVICE_ROWS asks for: the host's, or those of a GPU ("cuda").
quire::Device chosen_rows() {
  const char* const rows = std::getenv("QUIRE_TEST_DEVICE_ROWS");
  if (!rows || std::string_view(rows) == "host") return {kName, quire::ForAllProblems<Rows>::make(), faults, captures};
  quire::check(std::string_view(rows) == "cuda", "QUIRE_TEST_DEVICE_ROWS is '", rows, "'; it may be host or cuda");
#ifdef QUIRE_CUDA_ROWS
  return {kName, cuda_rows(), cuda_faults, captures};
#else
  quire::fail("QUIRE_TEST_DEVICE_ROWS=cuda: this build has no CUDA kernels, because it found no nvcc");
#endif
}

const bool registered = [] {
  static const quire::Device device = chosen_rows();
  quire::register_device(device);
  set_after_wait([](int index) { quire::raise_reported(*device.faults(index)); });
  return true;
}();

/// Uses memory of zeros as a kernel should: finds zeros, fills it and leaves zeros. found[0]: what was not 0.
int64_t use_zeroed(at::Tensor found, int64_t bytes) {
  const quire_torch::CallContext call(found.device());
  const quire::Context& context = call;
  Launch launch("use_zeroed", stream_of(found));
  void* const lent = context.workspace->zeroed(bytes);
  auto* const memory = static_cast<uint8_t*>(launch(lent));
  auto* const to = static_cast<int64_t*>(launch(found.mutable_data_ptr()));
  std::move(launch).run([=] {
    *to = bytes - std::count(memory, memory + bytes, 0);
    std::fill_n(memory, bytes, uint8_t{7});
    std::fill_n(memory, bytes, uint8_t{0});
  });
  return reinterpret_cast<int64_t>(lent);
}

std::string value_rules() {
  std::string lines;
  for (const quire::RuleText& row : quire::rule_texts()) lines += quire::text(row.name, "\t", row.text, "\n");
  return lines;
}

TORCH_LIBRARY_FRAGMENT(testdevice, m) {
  m.def("value_rules() -> str", value_rules);
  m.def("use_zeroed(Tensor(a!) found, int bytes) -> int", use_zeroed);
  m.def("is_captured(Tensor t) -> bool", [](const at::Tensor& t) {
    return static_cast<const quire::Context&>(quire_torch::CallContext(t.device())).capturing;
  });
}

TORCH_LIBRARY_IMPL(quire, PrivateUse1, m) { quire_torch::implement_kernels(m, c10::DispatchKey::PrivateUse1); }

}  // namespace
}  // namespace testdevice
