#include "quire/runner/stages.h"

#include "quire/gemm/gemm.h"
#include "quire/pointwise/pointwise.h"
#include "quire/quantize/quantize.h"

namespace quire {

void Stages::quantize(const QuantizeProblem& problem) const {
  quire::quantize(problem);
  if (observer) observer->quantized(part, problem);
}

void Stages::gemm(const char* product, const GemmProblem& problem) const {
  quire::gemm(problem);
  if (observer) observer->multiplied(part, product, problem);
}

void Stages::activation(const ActivationProblem& problem) const {
  quire::activation(problem);
  if (observer) observer->activated(part, problem);
}

}  // namespace quire
