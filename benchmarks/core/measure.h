// Timing a kernel against memcpy, in turns in one process, in memory that is not in a cache.
#pragma once

#include <benchmark/benchmark.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "quire/base/dtype.h"
#include "quire/base/matrix.h"

namespace quire::bench {

/// Bytes that the copies of a benchmark's memory fill together, so that the next one has left every cache.
inline constexpr int64_t kColdBytes = int64_t{128} << 20;

/// Options of the command line.
struct Options {
  std::vector<int64_t> threads{1, 2};
  bool cold = true;  ///< otherwise every run uses the same memory
};
Options& options();

/// 64-byte aligned bytes, zero at first, so that no page is missing when they are timed.
class Memory {
 public:
  explicit Memory(int64_t bytes);
  char* get() const { return bytes_.get(); }
  int64_t size() const { return size_; }

 private:
  struct Free {
    void operator()(char* p) const;
  };
  int64_t size_;
  std::unique_ptr<char, Free> bytes_;
};

/// About normally distributed values, the same in every run.
Memory normal_values(DType dtype, int64_t count);

/// How many copies of memory of `bytes` a benchmark rotates through.
int64_t copies(int64_t bytes);

/// What a run of a kernel moves, by algorithm: every input read once, every result written once.
struct Traffic {
  int64_t read, written;
  int64_t bytes() const { return read + written; }
};

/// Times run(copy) and memcpy of the same number of bytes in turns, on every number of threads. Reports the best times:
/// microseconds, GB/s and the ratio of memcpy's time to the kernel's.
void measure(benchmark::State& state, int64_t threads, const Traffic& traffic,
             const std::function<void(int64_t copy)>& run);

/// An amount of work and its unit, as in {"GOP/s", 1e9}: what one run does, in units of 1e9 a second.
struct Work {
  std::string_view unit;
  double amount;
};

/// The best rate of run(turn) on so many threads, beside nothing.
void measure_rate(benchmark::State& state, int64_t threads, const Work& work,
                  const std::function<void(int64_t turn)>& run);

/// Registers name/threads:T for every T of the options.
void add(const std::string& name, const std::function<void(benchmark::State&, int64_t threads)>& body);

/// The benchmarks, one function per file.
void add_machine();
void add_quantize();
void add_dequantize();
void add_pointwise();

}  // namespace quire::bench
