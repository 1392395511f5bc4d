#include "core/machine.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>

#include "core/measure.h"

namespace quire::bench {
namespace {

/// Bytes below which a copy stays on one thread.
constexpr int64_t kCopyGrain = int64_t{1} << 18;

}  // namespace

void copy(void* to, const void* from, int64_t bytes) {
  parallel_for(bytes, kCopyGrain, [&](int64_t begin, int64_t end) {
    std::memcpy(static_cast<char*>(to) + begin, static_cast<const char*>(from) + begin,
                static_cast<size_t>(end - begin));
  });
}

void read(const void* from, int64_t bytes) {
  static std::atomic<uint64_t> seen;
  const auto* words = static_cast<const uint64_t*>(from);
  parallel_for(bytes / 8, kCopyGrain / 8, [&](int64_t begin, int64_t end) {
    uint64_t sum = 0;
    for (int64_t i = begin; i < end; ++i) sum ^= words[i];
    seen ^= sum;
  });
}

void add_machine() {
  for (const Peak& peak : peaks())
    add("machine/" + std::string(peak.name), [peak](benchmark::State& state, int64_t threads) {
      measure_rate(state, threads, {"GOP/s", peak.operations * static_cast<double>(threads)},
                   [&](int64_t) { parallel_for(threads, 1, [&](int64_t, int64_t) { peak.run(); }); });
    });
  for (const int64_t mib : {1, 8, 256}) {
    const std::string size = "/" + std::to_string(mib) + "MiB";
    const int64_t bytes = mib << 20;
    add("machine/read" + size, [bytes](benchmark::State& state, int64_t threads) {
      const Memory from(bytes);
      measure_rate(state, threads, {"GB/s", static_cast<double>(bytes)}, [&](int64_t) { read(from.get(), bytes); });
    });
    add("machine/memcpy" + size, [bytes](benchmark::State& state, int64_t threads) {
      const Memory from(bytes / 2), to(bytes / 2);
      measure_rate(state, threads, {"GB/s", static_cast<double>(bytes)},
                   [&](int64_t) { copy(to.get(), from.get(), bytes / 2); });
    });
  }
}

}  // namespace quire::bench
