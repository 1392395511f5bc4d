// The core's own threads: every index once, on several threads, through exceptions, nesting, callers at once and fork.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "quire/base/check.h"
#include "quire/base/thread_pool.h"

namespace quire {
namespace {

/// How often each index was visited, and the shortest chunk but for the last one.
struct Visits {
  std::vector<std::atomic<int>> each;
  std::atomic<int64_t> shortest{INT64_MAX};
  explicit Visits(int64_t count) : each(static_cast<size_t>(count)) {}

  void add(int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) ++each[static_cast<size_t>(i)];
    if (end == std::ssize(each)) return;
    for (int64_t s = shortest; end - begin < s && !shortest.compare_exchange_weak(s, end - begin);) continue;
  }
  bool once() const {
    for (const auto& n : each)
      if (n != 1) return false;
    return true;
  }
};

TEST(ThreadPool, VisitsEveryIndexOnceInChunksOfTheGrain) {
  for (const int threads : {1, 2, 3, 7}) {
    const Executor executor = thread_executor(threads);
    for (const int64_t count : {1, 2, 6, 7, 8, 100, 1001})
      for (const int64_t grain : {0, 1, 3, 64, 5000}) {
        Visits visits(count);
        executor(count, grain, [&](int64_t begin, int64_t end) { visits.add(begin, end); });
        EXPECT_TRUE(visits.once()) << threads << " threads, " << count << " by " << grain;
        EXPECT_GE(visits.shortest, grain);
      }
  }
}

TEST(ThreadPool, RunsOnAsManyThreadsAsAskedForAgainAndAgain) {
  constexpr int kThreads = 4;
  const Executor executor = thread_executor(kThreads);
  for (int round = 0; round < 1000; ++round) {
    // Nobody passes before all have come, so each chunk must be on a thread of its own.
    std::barrier meeting(kThreads);
    std::mutex mutex;
    std::set<std::thread::id> seen;
    executor(kThreads, 1, [&](int64_t, int64_t) {
      meeting.arrive_and_wait();
      const std::lock_guard lock(mutex);
      seen.insert(std::this_thread::get_id());
    });
    ASSERT_EQ(seen.size(), kThreads);
    ASSERT_TRUE(seen.contains(std::this_thread::get_id()));
  }
}

TEST(ThreadPool, RethrowsOnceAllHaveStopped) {
  const Executor executor = thread_executor(3);
  std::atomic<int> running{0};
  for (int64_t thrower = 0; thrower < 3; ++thrower) {
    EXPECT_THROW(executor(3, 1,
                          [&](int64_t begin, int64_t) {
                            ++running;
                            if (begin == thrower) {
                              --running;
                              fail("chunk ", begin);
                            }
                            std::this_thread::sleep_for(std::chrono::milliseconds(5));
                            --running;
                          }),
                 Error);
    EXPECT_EQ(running, 0);
  }
  Visits visits(10);
  executor(10, 1, [&](int64_t begin, int64_t end) { visits.add(begin, end); });
  EXPECT_TRUE(visits.once());
}

TEST(ThreadPool, RangesWithinRangesAndOfOtherThreadsRunToo) {
  const Executor executor = thread_executor(3);
  std::vector<std::thread> callers;
  std::atomic<int64_t> sum{0};
  for (int caller = 0; caller < 4; ++caller)
    callers.emplace_back([&] {
      for (int round = 0; round < 200; ++round)
        executor(6, 1, [&](int64_t begin, int64_t end) {
          executor(end - begin, 1, [&](int64_t b, int64_t e) { sum += e - b; });
        });
    });
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(sum, 4 * 200 * 6);
}

TEST(ThreadPool, AChildOfForkComputesAlone) {
  const Executor executor = thread_executor(4);
  executor(4, 1, [](int64_t, int64_t) {});
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    Visits visits(9);
    executor(9, 1, [&](int64_t begin, int64_t end) { visits.add(begin, end); });
    _exit(visits.once() ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

TEST(ThreadPool, HasTheThreadsThatTheSystemStarts) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "AddressSanitizer needs memory of its own";
#endif
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    // No memory for the stacks of other threads, but for the few that ended threads have left.
    constexpr int64_t asked = 500;
    const rlimit least{1, 1};
    if (setrlimit(RLIMIT_AS, &least) != 0) _exit(2);
    const Executor executor = thread_executor(asked);
    Visits visits(9);
    executor(9, 1, [&](int64_t begin, int64_t end) { visits.add(begin, end); });
    _exit(!visits.once() ? 3 : executor.threads() < asked ? 0 : 4);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

TEST(ThreadPool, IsWhatTheCoreRunsOnByDefault) {
  if (std::thread::hardware_concurrency() < 2) GTEST_SKIP() << "one thread";
  std::barrier meeting(2);
  parallel_for(2, 1, [&](int64_t begin, int64_t end) {
    if (end - begin == 1) meeting.arrive_and_wait();  // both at once, or for ever
  });
  const Executor own = set_executor([](int64_t count, int64_t, const auto& body) { body(0, count); });
  set_executor({});
  std::atomic<int> chunks{0};
  parallel_for(2, 1, [&](int64_t, int64_t) { ++chunks; });
  EXPECT_EQ(chunks, 2);
}

TEST(ThreadPool, RefusesANegativeNumber) {
  EXPECT_THROW(thread_executor(-1), Error);
  EXPECT_TRUE(static_cast<bool>(thread_executor(0)));
}

}  // namespace
}  // namespace quire
