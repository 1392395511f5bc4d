// Threads for programs that bring none.
#pragma once

#include "quire/base/parallel.h"

namespace quire {

/// An executor of `threads` threads, of which the calling one is one; 0 stands for as many as the machine runs at once.
/// They start now and end with the last copy of the executor. A range that is begun while another one is running, by a
/// part of it or by another thread, runs on the calling thread alone; so do all ranges in a child process of fork(),
/// which has none of the threads. Throws Error for a negative number.
Executor thread_executor(int threads = 0);

}  // namespace quire
