#include "quire_torch/bridge/parallel.h"

#include <ATen/Parallel.h>

#include "quire/base/parallel.h"

namespace quire_torch {

void install_executor() {
  quire::set_executor([](int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body) {
    at::parallel_for(0, count, grain, body);
  });
}

}  // namespace quire_torch
