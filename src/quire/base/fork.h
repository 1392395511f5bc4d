// Mutexes and fork(): a child has no other threads, so it would wait forever for one that another thread held.
#pragma once

#include <pthread.h>

#include <mutex>

namespace quire {

/// From now on every fork() of this process waits for the mutex that Mutex returns and lets go of it afterwards, in the
/// parent and in the child. To be called once for each. Not for a shared_mutex: threads that wait for it count in it.
template <std::mutex& (*Mutex)()>
void hold_while_forking() {
  pthread_atfork([] { Mutex().lock(); }, [] { Mutex().unlock(); }, [] { Mutex().unlock(); });
}

}  // namespace quire
