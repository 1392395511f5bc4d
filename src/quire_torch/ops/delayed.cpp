#include "quire_torch/ops/delayed.h"

#include <algorithm>
#include <array>
#include <vector>

#include "quire/operations/operations.h"

namespace quire_torch {
namespace {

using quire::check;

thread_local int64_t collections = 0;

void check_vector(const at::Tensor& t, int64_t size, const char* what) {
  check(t.scalar_type() == at::kFloat && t.sizes() == at::IntArrayRef({size}) && t.is_contiguous(), what,
        " must be contiguous float32 of size [", size, "], got ", t.scalar_type(), " ", t.sizes());
}

void check_usage(const at::Tensor& t, const char* what) {
  check(t.scalar_type() == at::kLong && t.sizes() == at::IntArrayRef({3}) && t.is_contiguous(), what,
        " must be contiguous int64 of size [3] = {rule, rows forward, rows backward}, got ", t.scalar_type(), " ",
        t.sizes());
}

int64_t* usage_of(const at::Tensor& t) { return static_cast<int64_t*>(t.mutable_data_ptr()); }
float* floats(const at::Tensor& t) { return static_cast<float*>(t.mutable_data_ptr()); }

void check_entries(const DelayedUpdate::Args& a) {
  const size_t n = a.history.value.size();
  const std::array sizes{a.scale.value.size(), a.amax.value.size(), a.usage.value.size()};
  check(std::all_of(sizes.begin(), sizes.end(), [&](size_t s) { return s == n; }) &&
            (a.reduced.empty() || a.reduced.size() == n),
        "delayed_update_: every list must have one entry a state; got ", n, " of history, ", sizes[0], " of scale, ",
        sizes[1], " of amax, ", sizes[2], " of usage, ", a.reduced.size(), " of reduced (which may have none)");
  check(a.rules.scalar_type() == at::kDouble && a.rules.dim() == 2 && a.rules.size(1) == quire::kRuleColumns &&
            a.rules.is_contiguous(),
        "delayed_update_: rules must be a contiguous float64 table of ", int64_t{quire::kRuleColumns}, " columns, got ",
        a.rules.scalar_type(), " ", a.rules.sizes());
  for (size_t i = 0; i < n; ++i) {
    const at::Tensor& h = a.history.value[i];
    check(h.scalar_type() == at::kFloat && h.dim() == 2 && h.is_contiguous(),
          "delayed_update_: a history must be a contiguous float32 matrix, got ", h.scalar_type(), " ", h.sizes());
    check_vector(a.scale.value[i], h.size(1), "delayed_update_: scale");
    check_vector(a.amax.value[i], h.size(1), "delayed_update_: amax");
    if (!a.reduced.empty()) check_vector(a.reduced[i], h.size(1), "delayed_update_: reduced");
    check_usage(a.usage.value[i], "delayed_update_: usage");
  }
}

}  // namespace

void DelayedCollect::run(const Args& a, const quire::Context& context) {
  const at::Tensor &amax = a.amax.value, &rule = a.rule;
  check(amax.scalar_type() == at::kFloat && amax.dim() == 1 && amax.size(0) >= 2 && amax.is_contiguous(),
        "delayed_collect_: amax must be a contiguous float32 vector of x, w and y, each for all groups, got ",
        amax.scalar_type(), " ", amax.sizes());
  check_usage(a.usage.value, "delayed_collect_: usage");
  check(rule.scalar_type() == at::kLong && rule.numel() == 1, "delayed_collect_: rule must be an int64 scalar, got ",
        rule.scalar_type(), " ", rule.sizes());
  const int64_t groups = std::max<int64_t>(1, amax.size(0) / 3);
  check_vector(a.x_amax, groups, "delayed_collect_: x_amax");
  if (a.w_amax) check_vector(*a.w_amax, groups, "delayed_collect_: w_amax");
  quire::delayed_collect({.amax = floats(amax),
                          .of_x = floats(a.x_amax),
                          .of_w = a.w_amax ? floats(*a.w_amax) : nullptr,
                          .count = groups,
                          .number = usage_of(a.usage.value),
                          .rule = rule.const_data_ptr<int64_t>()},
                         context);
  ++collections;
}

int64_t delayed_collections() { return collections; }

void DelayedUpdate::run(const Args& a, const quire::Context& context) {
  // Python asks this where it runs; a graph does not know who runs it.
  check(!in_backward(),
        "delayed_update_: a backward pass recomputes a compiled function that enters quire.autocast with delayed "
        "scaling, which would end another step; enter it around the checkpoint");
  check_entries(a);
  std::vector<quire::DelayedState> states;
  for (size_t i = 0; i < a.history.value.size(); ++i) {
    const at::Tensor &history = a.history.value[i], &amax = a.amax.value[i];
    states.push_back({.history = floats(history),
                      .scale = floats(a.scale.value[i]),
                      .amax = floats(amax),
                      .reduced = floats(a.reduced.empty() ? amax : a.reduced[i]),
                      .usage = usage_of(a.usage.value[i]),
                      .rows = history.size(0),
                      .slots = history.size(1)});
  }
  quire::delayed_update({.states = states,
                         .rules = a.rules.const_data_ptr<double>(),
                         .rule_count = a.rules.size(0),
                         .backward = a.backward},
                        context);
}

}  // namespace quire_torch
