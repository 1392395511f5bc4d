// The state of delayed scaling (numerics.md 1.4): amaxes are collected by every forward and backward pass, scales
// change once a step.
//
// A state belongs to one product of a layer. Per direction it has scale f32 [n], amax f32 [n] (row 0 of the contract's
// history) and history f32 [rows, n], n = 3 forward and 2 backward, times the groups of a grouped product, slot after
// slot; and usage int64 [3] = {rule, rows of the history in
// use forward, and backward}. A rule is a recipe in a thread; its number is in `usage` of the states that ran under it
// last, so that a step finds them among those of the process.
#pragma once

#include "quire_torch/ops/quantize.h"

namespace quire_torch {

/// amax[i] = max(amax[i], x_amax[i]), amax[g + i] = max(amax[g + i], w_amax[i]) unless w was not quantized, for the g
/// groups of the product (1 but for grouped ones); usage[0] = rule.
/// Idempotent, so that a recomputed forward pass changes nothing. NaN is ignored (numerics.md 0.8, 1.5).
struct DelayedCollect : OpBase {
  static constexpr const char* kName = "delayed_collect_";
  struct Args {
    op::Mutable<at::Tensor> amax, usage;
    at::Tensor rule, x_amax;
    op::OptionalTensor w_amax;
    static constexpr auto kFields =
        std::tuple{op::field<&Args::amax>("amax"), op::field<&Args::usage>("usage"), op::field<&Args::rule>("rule"),
                   op::field<&Args::x_amax>("x_amax"), op::field<&Args::w_amax>("w_amax")};
  };
  static constexpr auto kResults = op::kNoResults;
  static void run(const Args& a, const quire::Context& context);
};

/// How often this thread has called delayed_collect_, from Python or from graphs.
int64_t delayed_collections();

/// Whether this thread runs a backward pass. Defined where autograd's headers are.
bool in_backward();

/// Ends a step of one direction (numerics.md 1.6) for each state whose rule is in `rules`, a table of
/// quire::RuleColumn; the others are left alone.
/// One entry a state in each list; reduced [n] is its amax after a reduction over devices, or the list is empty. Of a
/// history the rule's `length` rows are used and the others zeroed, so that the length may change between steps
/// (numerics.md 1.4). Nothing is changed if anything does not fit.
struct DelayedUpdate : OpBase {
  static constexpr const char* kName = "delayed_update_";
  struct Args {
    op::Mutable<op::TensorList> history, scale, amax, usage;
    op::TensorList reduced;
    at::Tensor rules;
    bool backward;
    static constexpr auto kFields = std::tuple{op::field<&Args::history>("history"),  op::field<&Args::scale>("scale"),
                                               op::field<&Args::amax>("amax"),        op::field<&Args::usage>("usage"),
                                               op::field<&Args::reduced>("reduced"),  op::field<&Args::rules>("rules"),
                                               op::field<&Args::backward>("backward")};
  };
  static constexpr auto kResults = op::kNoResults;
  static void run(const Args& a, const quire::Context& context);
};

}  // namespace quire_torch
