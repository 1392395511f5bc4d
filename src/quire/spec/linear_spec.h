// The specs of a Linear's roles and how it computes its gradients, as one value with text: what the `recipe` argument
// of the operators holds.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "quire/spec/quant_spec.h"

namespace quire {

/// How the input x of a product is quantized; absent: not at all, then w is decoded (numerics.md 6.12).
struct InputSpec : std::optional<QuantSpec> {
  using std::optional<QuantSpec>::optional;

  /// A spec, or "none". Throws Error if it is neither.
  static InputSpec parse(std::string_view text);
  std::string to_string() const;
};

/// What the gradients of a Linear are computed from (numerics.md 6.8, 6.9).
enum class Backward : uint8_t {
  quantized,       ///< columnwise codes made in the forward pass
  requantized,     ///< x is kept as it came and quantized columnwise in the backward pass
  dequantized,     ///< the decoded rowwise codes of x and w, dy as it comes
  high_precision,  ///< x, w and dy as they came
};

/// The word of a recipe for it; "" for quantized, which no word says.
std::string_view to_string(Backward backward);

/// Which operand feeds which product, and in which direction, is numerics.md 6.1:
///   y  = x rowwise * w rowwise        (contracts K)
///   dx = dy rowwise * w columnwise    (contracts N)
///   dw = dy columnwise * x columnwise (contracts M)
struct LinearSpec {
  QuantSpec x, w, dy;
  /// x and dy are multiplied as they are, and w by its decoded values: "x=none,w=SPEC,dy=none". Backward is then
  /// dequantized or high_precision, and starts from x itself.
  bool weight_only = false;
  std::optional<QuantSpec> dx{};  ///< dx is quantized and decoded again before it is returned
  Backward backward = Backward::quantized;
  bool batch_invariant = false;  ///< only kernels that give a token the bits that it has alone (numerics.md 7.8)

  /// "x=SPEC,w=SPEC,dy=SPEC[,dx=SPEC][,backward=requantized|dequantized|high_precision][,kernels=batch_invariant]".
  /// Throws Error if the text is wrong or a spec does not fit its role: only dy may round stochastically, w is never
  /// Hadamard-transformed, x and dy must be transformed alike (the transform cancels in dw), dx neither. "none" is the
  /// spec of x and dy, or of neither. With kernels=batch_invariant no scale of x may follow from several tokens.
  static LinearSpec parse(std::string_view text);
  std::string to_string() const;

  bool operator==(const LinearSpec&) const = default;
};

/// Throws Error, which begins with `where`, unless codes of a token of x follow from that token alone, or from a scale
/// that the caller gives: under the option `given`, or a static_scale.
void check_tokens_alone(const QuantSpec& x, std::string_view where, bool static_scale = false);

/// A LinearSpec, or nothing for products of x and w as they are.
struct OptionalLinearSpec : std::optional<LinearSpec> {
  using std::optional<LinearSpec>::optional;

  bool batch_invariant = false;  ///< as that of LinearSpec; "kernels=batch_invariant" says it of nothing

  /// A LinearSpec, "" or "kernels=batch_invariant". Throws Error if it is none of them.
  static OptionalLinearSpec parse(std::string_view text);
};

}  // namespace quire
