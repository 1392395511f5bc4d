// One problem on the CPU and on the CUDA device, over the same memory: what both write is compared.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "cuda/cuda_device.h"
#include "quire/device/dispatch.h"
#include "quire/format/element.h"

namespace quire::testing {

/// Memory that a problem writes.
struct Written {
  const char* what;
  void* data;
  int64_t bytes;
  /// Of floating numbers: all NaN are the same, because which one it is depends on the processor.
  std::optional<DType> floats{};

  std::string contents() const {
    std::string all(static_cast<const char*>(data), static_cast<size_t>(bytes));
    for (int64_t i = 0; floats && i < bytes / size_of(*floats); ++i)
      if (std::isnan(load_element(all.data(), *floats, i))) store_element(all.data(), *floats, i, NAN);
    return all;
  }
};

class Twins {
 public:
  /// An array of the device's memory, which the CPU reads and writes too.
  template <class T>
  T* array(const std::vector<T>& values) {
    auto* const to = reinterpret_cast<T*>(device.memory().allocate(values.size() * sizeof(T)));
    std::copy(values.begin(), values.end(), to);
    return to;
  }
  /// `count` elements of nothing in particular.
  template <class T>
  T* room(int64_t count) {
    return reinterpret_cast<T*>(device.memory().allocate(static_cast<size_t>(count) * sizeof(T)));
  }

  /// Runs the problem on both; each begins with what `written` holds now, and must leave the same bytes there.
  template <class Problem>
  void expect_same(const Problem& problem, const std::vector<Written>& written) {
    std::vector<std::string> before;
    for (const Written& one : written)
      before.emplace_back(static_cast<const char*>(one.data), static_cast<size_t>(one.bytes));
    dispatch(problem, host());
    const std::vector<std::string> expected = contents(written);
    for (size_t i = 0; i < written.size(); ++i) std::memcpy(written[i].data, before[i].data(), before[i].size());
    run_on_device(problem);
    const std::vector<std::string> found = contents(written);
    for (size_t i = 0; i < written.size(); ++i) {
      const auto differs = std::mismatch(expected[i].begin(), expected[i].end(), found[i].begin());
      EXPECT_EQ(differs.first, expected[i].end())
          << to_string(problem) << ": " << written[i].what << " differs at byte " << differs.first - expected[i].begin()
          << " of " << expected[i].size();
    }
  }

  /// Both refuse the problem with the same words: the CPU at once, the device once somebody waits.
  template <class Problem>
  void expect_same_error(const Problem& problem) {
    EXPECT_EQ(error_of([&] { dispatch(problem, host()); }), error_of([&] { run_on_device(problem); }));
  }

  CudaDevice device;
  /// The kernel that the device runs, by its name in the table; empty: the first one that takes the problem.
  std::string kernel;

 private:
  template <class Problem>
  void run_on_device(const Problem& problem) {
    const Context& context = device;
    try {
      if (kernel.empty()) {
        dispatch(problem, context);
      } else {
        const Choice<Problem> forced{kernels<Problem>(context), kernel};
        choose(Problem::kOp, forced, problem, context).run(problem, context);
      }
    } catch (const emulator::Error& e) {
      ADD_FAILURE() << to_string(problem) << ": " << e.what();
    }
    device.synchronize();
  }
  template <class Call>
  static std::string error_of(const Call& call) {
    try {
      call();
    } catch (const Error& e) {
      return e.what();
    }
    ADD_FAILURE() << "no error";
    return "";
  }
  static std::vector<std::string> contents(const std::vector<Written>& written) {
    std::vector<std::string> all;
    for (const Written& one : written) all.push_back(one.contents());
    return all;
  }
};

}  // namespace quire::testing
