// The kernel of a toy.
#pragma once

#include "quire/base/parallel.h"
#include "quire/spec/halve_problem.h"

namespace quire::cpu {

inline void halve(const HalveProblem& p, const Context&) {
  parallel_for(p.count, 1024, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) p.y[i] = p.x[i] / 2;
  });
}

}  // namespace quire::cpu
