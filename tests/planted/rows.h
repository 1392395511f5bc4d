// Plants a fault in the kernels of the CPU, as a wrong kernel would have it: every row of a problem's table runs the
// fault, which spoils what the row is given, or what it has written. The library under test is not changed.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <utility>

#include "quire/base/check.h"
#include "quire/device/device.h"

namespace planted {

template <class Problem>
using Run = void (*)(const Problem&, const quire::Context&);

/// What the row would have run.
template <class Problem>
struct Kernel {
  Run<Problem> run;
  const quire::Context& context;

  void operator()(const Problem& problem) const { run(problem, context); }
};

/// A fault gets the problem, which it may change, and the kernel, which it is to call.
template <class Problem>
using Fault = void (*)(Problem, const Kernel<Problem>&);

template <class Problem>
bool in_groups(const Problem& problem) {
  if constexpr (requires { problem.in_groups(); })
    return problem.in_groups();
  else
    return false;
}

/// Lets the rows of constant tables be written.
inline void open(const void* begin, size_t bytes) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t first = reinterpret_cast<uintptr_t>(begin) & ~(page - 1);
  const uintptr_t last = reinterpret_cast<uintptr_t>(begin) + bytes;
  quire::check(mprotect(reinterpret_cast<void*>(first), last - first, PROT_READ | PROT_WRITE) == 0,
               "planted: the tables of kernels cannot be written");
}

/// Rows of `fault`. kGroups: it spoils problems of groups, which rows cut into problems of one tensor; else those.
template <class Problem, Fault<Problem> fault, bool kGroups>
class Rows {
 public:
  static void plant() {
    const auto rows = quire::kernels<Problem>(quire::host());
    quire::check(!rows.empty() && rows.size() <= kMost, "planted: ", Problem::kOp, " has ", rows.size(),
                 " rows; raise kMost of rows.h");
    open(rows.data(), rows.size_bytes());
    replace(rows, std::make_index_sequence<kMost>());
  }

 private:
  static constexpr size_t kMost = 8;
  static inline std::array<Run<Problem>, kMost> kernels{};

  template <size_t number>
  static void run(const Problem& problem, const quire::Context& context) {
    const Kernel<Problem> kernel{kernels[number], context};
    if (in_groups(problem) == kGroups)
      fault(problem, kernel);
    else
      kernel(problem);
  }

  template <size_t... numbers>
  static void replace(quire::KernelRows<Problem> rows, std::index_sequence<numbers...>) {
    constexpr std::array<Run<Problem>, kMost> faulty{run<numbers>...};
    for (size_t i = 0; i < rows.size(); ++i) {
      kernels[i] = rows[i].run;
      const_cast<quire::KernelRow<Problem>&>(rows[i]).run = faulty[i];
    }
  }
};

template <auto fault>
struct Planter;
template <class Problem, void (*fault)(Problem, const Kernel<Problem>&)>
struct Planter<fault> {
  static void of_tensors() { Rows<Problem, fault, false>::plant(); }
  static void of_groups() { Rows<Problem, fault, true>::plant(); }
};

}  // namespace planted
