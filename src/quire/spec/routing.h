// How a token chooses its experts, as a value with canonical text (moe-reference.md).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace quire {

/// What makes scores of logits: softmax over the experts, or a function of each logit alone; sqrtsoftplus is
/// sqrt(log(1 + e^x)).
enum class ScoreFunction : uint8_t { softmax, sigmoid, sqrtsoftplus };
std::string_view name(ScoreFunction function);

/// Immutable by convention.
struct Routing {
  ScoreFunction score = ScoreFunction::softmax;
  bool after_topk = false;   ///< softmax over the logits of the chosen experts, which are chosen by their logits
  bool renormalize = false;  ///< weights are divided by their sum
  int64_t topk = 0;          ///< experts of a token
  int64_t num_groups = 0;    ///< equal groups of neighbouring experts; 0: none
  int64_t group_topk = 0;    ///< groups that a token may choose from
  int64_t group_best = 0;    ///< how many of a group's best experts make its score, their sum
  float scaling_factor = 1;  ///< multiplies the weights at last

  /// Text such as "softmax:topk=2:renormalize" or "sigmoid:topk=8:num_groups=8:group_topk=4:scaling_factor=2.5"
  /// (options in any order; group_best is topk / group_topk unless given). Throws Error naming what is allowed.
  static Routing parse(std::string_view text);
  /// Canonical: parse(r.to_string()) == r.
  std::string to_string() const;

  bool operator==(const Routing&) const = default;

  /// Throws Error unless tokens can choose among that many experts in this way.
  void check_experts(int64_t num_experts) const;
};

}  // namespace quire
