// y = x w^T + bias from a weight that was quantized once.
#pragma once

#include "quire/runner/prepared_weight.h"
#include "quire/runner/runner.h"

namespace quire {

/// Quantizes x rowwise and multiplies: the bits of quire::linear under "x=X,w=W", whatever the dtypes of x and out.
/// Without a spec of x the weight is decoded and multiplied by the library that the program lends (device/library.h).
class LinearRunner final : public Runner {
 public:
  /// x: how activations are quantized. Throws Error if the weight cannot take them so, or is not one.
  LinearRunner(PreparedWeight weight, const InputSpec& x);

  void run(const RunnerCall& call) override;
  void take(const Runner& other, const Storage& storage) override;

 private:
  PreparedWeight weight_;
  InputSpec x_;
};

}  // namespace quire
