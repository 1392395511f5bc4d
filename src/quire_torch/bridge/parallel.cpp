#include "quire_torch/bridge/parallel.h"

#include <ATen/Parallel.h>
#include <omp.h>
#include <pthread.h>

#include "quire/base/parallel.h"

namespace quire_torch {

void install_executor() {
  // A child of fork() has none of OpenMP's threads, and would wait for those of the forking thread without end. So that
  // thread ends them before; parent and child start new ones when they need them, PyTorch's own operators too.
  pthread_atfork([] { omp_pause_resource_all(omp_pause_soft); }, nullptr, nullptr);
  quire::set_executor({[](int64_t count, int64_t grain, quire::FunctionRef<void(int64_t, int64_t)> body) {
                         at::parallel_for(0, count, grain, body);
                       },
                       [] { return int64_t{at::get_num_threads()}; }});
}

}  // namespace quire_torch
