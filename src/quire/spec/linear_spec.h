// The specs of a Linear's three roles, as one value with text: what the `recipe` argument of the operators holds.
#pragma once

#include <string>
#include <string_view>

#include "quire/spec/quant_spec.h"

namespace quire {

/// Which operand feeds which product, and in which direction, is numerics.md 6.1:
///   y  = x rowwise * w rowwise        (contracts K)
///   dx = dy rowwise * w columnwise    (contracts N)
///   dw = dy columnwise * x columnwise (contracts M)
struct LinearSpec {
  QuantSpec x, w, dy;

  /// "x=SPEC,w=SPEC,dy=SPEC". Throws Error if the text is wrong or a spec does not fit its role: only dy may round
  /// stochastically, w is never Hadamard-transformed, x and dy must be transformed alike (the transform cancels in dw).
  static LinearSpec parse(std::string_view text);
  std::string to_string() const;

  bool operator==(const LinearSpec&) const = default;
};

}  // namespace quire
