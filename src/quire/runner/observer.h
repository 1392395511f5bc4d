// Those who want to know what a runner does.
#pragma once

#include <string>

#include "quire/spec/pointwise_problem.h"

namespace quire {

/// Hears of each step of a runner after it has run, from the thread that calls the runner, while the problem's memory
/// is as the step left it. part: "" or a part of the runner, such as "expert 3".
class RunnerObserver {
 public:
  virtual ~RunnerObserver() = default;

  virtual void quantized(const std::string& part, const QuantizeProblem& problem) = 0;
  /// product: "fprop", or of a mixture "w13" and "w2".
  virtual void multiplied(const std::string& part, const char* product, const GemmProblem& problem) = 0;
  virtual void activated(const std::string& part, const ActivationProblem& problem) = 0;
};

}  // namespace quire
