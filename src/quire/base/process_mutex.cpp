#include "quire/base/process_mutex.h"

#include <pthread.h>

namespace quire {

/// All of the process, as a list.
class ProcessMutexes {
 public:
  void add(ProcessMutex& mutex) {
    const std::lock_guard lock(mutex_);
    mutex.next_ = first_;
    first_ = &mutex;
  }
  void remove(const ProcessMutex& mutex) {
    const std::lock_guard lock(mutex_);
    ProcessMutex** link = &first_;
    while (*link != &mutex) link = &(*link)->next_;
    *link = mutex.next_;
  }

  /// A thread may wait for one while it holds another, so nobody waits here while it holds any.
  void lock() {
    mutex_.lock();
    while (ProcessMutex* const held_by_another = try_lock()) {
      held_by_another->lock();
      held_by_another->unlock();
    }
  }
  void unlock() {
    unlock_before(nullptr);
    mutex_.unlock();
  }

 private:
  /// Null if it has all of them; otherwise it has none, and the result is one that another thread has.
  ProcessMutex* try_lock() {
    for (ProcessMutex* m = first_; m; m = m->next_) {
      if (m->try_lock()) continue;
      unlock_before(m);
      return m;
    }
    return nullptr;
  }
  void unlock_before(const ProcessMutex* end) {
    for (ProcessMutex* m = first_; m != end; m = m->next_) m->unlock();
  }

  std::mutex mutex_;  ///< of the list
  ProcessMutex* first_ = nullptr;
};

namespace {

constinit ProcessMutexes all;

/// Already when the library is loaded: handlers before a fork run in the order opposite to that of their registration,
/// and those of libraries that use this one come first.
[[maybe_unused]] const int registered = pthread_atfork([] { all.lock(); }, [] { all.unlock(); }, [] { all.unlock(); });

}  // namespace

ProcessMutex::ProcessMutex() { all.add(*this); }
ProcessMutex::~ProcessMutex() { all.remove(*this); }

}  // namespace quire
