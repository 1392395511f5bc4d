#include "core/measure.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <random>

#include "core/machine.h"
#include "quire/base/thread_pool.h"
#include "quire/format/element.h"

namespace quire::bench {
namespace {

constexpr std::align_val_t kAlignment{64};

template <class Run>
double seconds(const Run& run) {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  run();
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

}  // namespace

Options& options() {
  static Options instance;
  return instance;
}

Memory::Memory(int64_t bytes)
    : size_(bytes), bytes_(static_cast<char*>(::operator new(static_cast<size_t>(bytes), kAlignment))) {
  std::memset(bytes_.get(), 0, static_cast<size_t>(bytes));
}

void Memory::Free::operator()(char* p) const { ::operator delete(p, kAlignment); }

Memory normal_values(DType dtype, int64_t count) {
  std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  // Long enough that no block repeats within a cache line's neighbourhood, short enough to be made at once.
  constexpr int64_t kPeriod = 65537;
  Memory values(count * size_of(dtype));
  for (int64_t i = 0; i < std::min(count, kPeriod); ++i) store_element(values.get(), dtype, i, normal(generator));
  for (int64_t i = kPeriod; i < count; i += kPeriod)
    std::memcpy(values.get() + i * size_of(dtype), values.get(),
                static_cast<size_t>(std::min(kPeriod, count - i) * size_of(dtype)));
  return values;
}

int64_t copies(int64_t bytes) {
  return options().cold ? std::max<int64_t>(2, kColdBytes / std::max<int64_t>(bytes, 1)) : 1;
}

void measure(benchmark::State& state, int64_t threads, const Traffic& traffic,
             const std::function<void(int64_t copy)>& run) {
  const Executor before = set_executor(thread_executor(static_cast<int>(threads)));
  const int64_t half = (traffic.bytes() + 1) / 2, count = copies(traffic.bytes());
  std::vector<Memory> from, to;
  for (int64_t i = 0; i < count; ++i) from.emplace_back(half), to.emplace_back(half);
  const auto copy_one = [&](int64_t i) {
    copy(to[static_cast<size_t>(i)].get(), from[static_cast<size_t>(i)].get(), half);
  };
  double best = 1e30, best_copy = 1e30;
  int64_t turn = 0;
  run(0);
  for (auto _ : state) {
    turn = (turn + 1) % count;
    const double took = seconds([&] { run(turn); });
    best = std::min(best, took);
    best_copy = std::min(best_copy, seconds([&] { copy_one(turn); }));
    state.SetIterationTime(took);
  }
  set_executor(before);
  state.counters["us"] = best * 1e6;
  state.counters["GB/s"] = static_cast<double>(traffic.bytes()) / best * 1e-9;
  state.counters["memcpy GB/s"] = static_cast<double>(2 * half) / best_copy * 1e-9;
  state.counters["of memcpy"] = best_copy / best;
}

void measure_rate(benchmark::State& state, int64_t threads, const Work& work,
                  const std::function<void(int64_t turn)>& run) {
  const Executor before = set_executor(thread_executor(static_cast<int>(threads)));
  double best = 1e30;
  int64_t turn = 0;
  run(turn);
  for (auto _ : state) {
    const double took = seconds([&] { run(++turn); });
    best = std::min(best, took);
    state.SetIterationTime(took);
  }
  set_executor(before);
  state.counters["us"] = best * 1e6;
  state.counters[std::string(work.unit)] = work.amount / best * 1e-9;
}

void add(const std::string& name, const std::function<void(benchmark::State&, int64_t threads)>& body) {
  for (const int64_t threads : options().threads) {
    const std::string full = name + "/threads:" + std::to_string(threads);
    benchmark::RegisterBenchmark(full.c_str(), [=](benchmark::State& state) { body(state, threads); })
        ->UseManualTime()
        ->Unit(benchmark::kMicrosecond);
  }
}

}  // namespace quire::bench
