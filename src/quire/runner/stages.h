// The steps that quire's runners are made of.
#pragma once

#include <string>

#include "quire/runner/observer.h"
#include "quire/spec/pointwise_problem.h"

namespace quire {

/// Runs problems, and tells an observer of each if there is one.
struct Stages {
  RunnerObserver* observer = nullptr;
  std::string part{};  ///< of the runner: "", "expert 3", "shared expert"; for the observer

  void quantize(const QuantizeProblem& problem) const;
  void gemm(const char* product, const GemmProblem& problem) const;
  void activation(const ActivationProblem& problem) const;
};

}  // namespace quire
