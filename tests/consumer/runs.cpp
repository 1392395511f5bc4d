// Loads a library with a runner (argv[1]) and asks for it by name.
#include <dlfcn.h>

#include <iostream>
#include <vector>

#include "quire/runner/registry.h"

int main(int, char** argv) {
  if (dlopen(argv[1], RTLD_NOW) == nullptr) {
    std::cout << dlerror() << '\n';
    return 1;
  }
  const std::vector<float> x{1, -2, 3, 4, 5, 6, 7, 8};
  std::vector<float> y(x.size());
  const quire::RunnerRequest request{.op = "runs",
                                     .call = {.x = {.data = x.data(), .rows = 1, .cols = 8, .row_stride = 8},
                                              .out = {.data = y.data(), .rows = 1, .cols = 8, .row_stride = 8}}};
  quire::run(*quire::find_runner("runs", std::string_view("consumer.scale")), request);
  for (size_t i = 0; i < x.size(); ++i)
    if (y[i] != 2 * x[i]) return 1;
  std::cout << "consumer.scale: equal\n";
}
