// How long tests of kernels run.
#pragma once

#include <cstdlib>
#include <string_view>

namespace quire::testing {

/// QUIRE_CUDA_CASES=many: a longer run with more cases.
inline bool many_cases() {
  const char* const cases = std::getenv("QUIRE_CUDA_CASES");
  return cases && std::string_view(cases) == "many";
}

}  // namespace quire::testing
