// Copies of what a problem has read and written, for observers: taken in the order of the stream, once it has run.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <vector>

#include "quire/base/context.h"
#include "quire/spec/problem.h"

namespace quire_torch {

/// The three buffers of one side of a quantization, on `to`; of size [0] where the side is absent.
std::array<at::Tensor, 3> copy_side(const quire::QuantizeProblem& p, quire::Direction direction,
                                    const quire::Context& context, at::Device to);

/// A quantization on any device as a problem of the host, which is told of it after it has run. Waits for it.
class HostCopy {
 public:
  HostCopy(const quire::QuantizeProblem& p, const quire::Context& context);
  const quire::QuantizeProblem& problem() const { return problem_; }

 private:
  const float* copy(const float* values, int64_t count, at::Device from);

  quire::QuantizeProblem problem_;
  std::vector<at::Tensor> holders_;
};

}  // namespace quire_torch
