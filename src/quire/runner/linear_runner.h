// y = x w^T + bias from a weight that was quantized once.
#pragma once

#include "quire/runner/prepared_weight.h"
#include "quire/runner/runner.h"

namespace quire {

/// Quantizes x rowwise and multiplies: the bits of quire::linear under "x=X,w=W", whatever the dtypes of x and out.
class LinearRunner final : public Runner {
 public:
  /// x: how activations are quantized. Throws Error if it rounds stochastically.
  LinearRunner(PreparedWeight weight, const QuantSpec& x);

  void run(const RunnerCall& call) override;

 private:
  PreparedWeight weight_;
  QuantSpec x_;
};

/// Throws Error unless x can be how a runner quantizes activations.
void check_activation_spec(const QuantSpec& x);

}  // namespace quire
