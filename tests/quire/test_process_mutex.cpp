// Locks that other threads hold while the process forks.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <latch>
#include <thread>

#include "quire/base/process_mutex.h"

namespace quire {
namespace {

/// The child's status when it has taken and released the mutexes; a child that waits for ever ends by SIGALRM.
template <class... Mutexes>
int status_of_child_that_locks(Mutexes&... mutexes) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    (mutexes.lock(), ...);
    (mutexes.unlock(), ...);
    _exit(0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  return status;
}

TEST(ProcessMutex, AChildDoesNotWaitForALockThatAnotherThreadHeldAtTheFork) {
  ProcessMutex mutex;
  std::latch held(1);
  std::thread holder([&] {
    const std::lock_guard lock(mutex);
    held.count_down();
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  });
  held.wait();
  EXPECT_EQ(status_of_child_that_locks(mutex), 0);
  holder.join();
  const std::lock_guard lock(mutex);  // the parent's is free, too
}

TEST(ProcessMutex, AForkDoesNotWaitForAThreadThatHoldsOneAndWaitsForAnother) {
  ProcessMutex a, b, c;
  std::atomic<bool> done{false};
  const auto hold_both = [&](ProcessMutex& first, ProcessMutex& second) {
    while (!done) {
      const std::lock_guard outer(first);
      const std::lock_guard inner(second);
    }
  };
  // In one order and, with another mutex, in the other: whichever the list has first.
  std::thread one([&] { hold_both(a, b); }), other([&] { hold_both(c, b); });
  for (int i = 0; i < 50; ++i) EXPECT_EQ(status_of_child_that_locks(a, b, c), 0) << "fork " << i;
  done = true;
  one.join();
  other.join();
}

TEST(ProcessMutex, AForkDoesNotWaitForOneThatHasEnded) {
  {
    ProcessMutex first, second;
    const ProcessMutex third;
  }
  ProcessMutex alive;
  EXPECT_EQ(status_of_child_that_locks(alive), 0);
}

}  // namespace
}  // namespace quire
