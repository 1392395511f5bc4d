// The mutex of what a whole process shares. A child of fork() has no other threads, so it would wait forever for a
// std::mutex that another thread held.
#pragma once

#include <mutex>

namespace quire {

/// Every fork() of the process waits for all of these and lets go of them, in the parent and in the child. A holder
/// calls no code of others: a fork whose thread holds Python's lock would wait for one that waits for that lock.
class ProcessMutex {
 public:
  ProcessMutex();
  ~ProcessMutex();
  ProcessMutex(const ProcessMutex&) = delete;
  ProcessMutex& operator=(const ProcessMutex&) = delete;

  void lock() { mutex_.lock(); }
  bool try_lock() { return mutex_.try_lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  friend class ProcessMutexes;

  std::mutex mutex_;
  ProcessMutex* next_ = nullptr;
};

}  // namespace quire
