// What the host asks the kernels of state.cu for.
#pragma once

#include "quire/cuda/kernels/groups.h"
#include "quire/spec/state_problem.h"

namespace quire::cuda {

/// Fingerprints of groups, blockIdx.y counts them.
struct FingerprintJob {
  Matrix x;
  const Matrix* each;  ///< a matrix for each group, instead of x's memory; or null
  Places groups;
  Places only;     ///< with places: groups that have no rows here are left out
  uint64_t* sums;  ///< of mixed words, of each group, 0 at first
  int64_t* to;
  const int64_t* expected;
  FaultSite site;
};

/// What ends the step of a state.
struct StepPlan {
  const double* rule;  ///< null: nothing does
  int64_t in_use;      ///< rows of the history before
};

struct DelayedUpdateJob {
  const DelayedState* states;
  int64_t count;
  const double* rules;
  int64_t rule_count;
  bool backward;
  StepPlan* plans;   ///< [count]
  uint32_t* broken;  ///< 0 at first: whether a state breaks a rule, and all stay
  FaultSite site;
};

}  // namespace quire::cuda
