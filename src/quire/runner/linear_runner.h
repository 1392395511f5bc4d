// y = x w^T + bias from a weight that was quantized once.
#pragma once

#include "quire/runner/prepared_weight.h"
#include "quire/runner/runner.h"

namespace quire {

/// Quantizes x rowwise and multiplies: the bits of quire::linear under "x=X,w=W", whatever the dtypes of x and out.
class LinearRunner final : public Runner {
 public:
  /// x: how activations are quantized. Throws Error if the weight cannot take them so.
  LinearRunner(PreparedWeight weight, const QuantSpec& x);

  void run(const RunnerCall& call) override;

 private:
  PreparedWeight weight_;
  QuantSpec x_;
};

}  // namespace quire
