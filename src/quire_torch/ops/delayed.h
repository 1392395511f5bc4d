// The state of delayed scaling (numerics.md 1.4): amaxes are collected by every forward and backward pass, scales
// change once a step.
//
// A state belongs to one product of a layer and one direction of it: scale f32 [n], amax f32 [n] (row 0 of the history
// of the contract), history f32 [L, n], n = 3 forward and 2 backward. `rule`, an int64 scalar, numbers the recipe and
// the thread under which amaxes were collected last, so that an update finds its own states among those of the process.
#pragma once

#include "quire_torch/ops/quantize.h"

namespace quire_torch {

/// amax[0] = max(amax[0], x_amax), amax[1] = max(amax[1], w_amax) unless w was not quantized, state_rule = rule.
/// Idempotent, so that a recomputed forward pass changes nothing. NaN is ignored (numerics.md 0.8, 1.5).
struct DelayedCollect : OpBase {
  static constexpr const char* kName = "delayed_collect_";
  struct Args {
    op::Mutable<at::Tensor> amax, state_rule;
    at::Tensor rule, x_amax;
    op::OptionalTensor w_amax;
    static constexpr auto kFields = std::tuple{
        op::field<&Args::amax>("amax"), op::field<&Args::state_rule>("state_rule"), op::field<&Args::rule>("rule"),
        op::field<&Args::x_amax>("x_amax"), op::field<&Args::w_amax>("w_amax")};
  };
  static constexpr auto kResults = op::kNoResults;
  static void cpu(const Args& a);
};

/// Ends a step (numerics.md 1.6) for each state whose state_rule is `rule`; the others are left alone. One entry a
/// state in each list: history [rows >= length, n], scale [n], amax [n], state_rule, largest (that of the element
/// format), and reduced [n], its amax after a reduction over devices, or no entries. Of a history the first `length`
/// rows are used and the others zeroed, so that it may be shortened and lengthened between steps (numerics.md 1.4).
/// algorithm: "max" or "most_recent". Nothing is changed if anything does not fit.
struct DelayedUpdate : OpBase {
  static constexpr const char* kName = "delayed_update_";
  struct Args {
    op::Mutable<op::TensorList> history, scale, amax;
    op::TensorList reduced, state_rule;
    at::Tensor rule;
    std::vector<double> largest;
    int64_t length;
    std::string algorithm;
    int64_t margin;
    static constexpr auto kFields = std::tuple{op::field<&Args::history>("history"),
                                               op::field<&Args::scale>("scale"),
                                               op::field<&Args::amax>("amax"),
                                               op::field<&Args::reduced>("reduced"),
                                               op::field<&Args::state_rule>("state_rule"),
                                               op::field<&Args::rule>("rule"),
                                               op::field<&Args::largest>("largest"),
                                               op::field<&Args::length>("length"),
                                               op::field<&Args::algorithm>("algorithm"),
                                               op::field<&Args::margin>("margin")};
  };
  static constexpr auto kResults = op::kNoResults;
  static void cpu(const Args& a);
};

}  // namespace quire_torch
