#include "quire_torch/ops/delayed.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "quire/base/float_mode.h"
#include "quire/spec/delayed.h"

namespace quire_torch {
namespace {

using quire::check;

void check_rule(const at::Tensor& t, const char* what) {
  check(t.scalar_type() == at::kLong && t.numel() == 1, what, " must be an int64 scalar, got ", t.scalar_type(), " ",
        t.sizes());
}

void check_vector(const at::Tensor& t, int64_t size, const char* what) {
  check(t.scalar_type() == at::kFloat && t.sizes() == at::IntArrayRef({size}) && t.is_contiguous(), what,
        " must be contiguous float32 of size [", size, "], got ", t.scalar_type(), " ", t.sizes());
}

void collect(float& slot, const at::Tensor& value) { slot = std::fmax(slot, *value.const_data_ptr<float>()); }

quire::DelayedRule rule_of(const DelayedUpdate::Args& a) {
  const bool newest = a.algorithm == "most_recent";
  check(newest || a.algorithm == "max", "delayed_update_: algorithm must be 'max' or 'most_recent', got '", a.algorithm,
        "'");
  check(std::abs(a.margin) < 256, "delayed_update_: margin must be between -255 and 255, got ", a.margin);
  return {.algorithm = newest ? quire::AmaxAlgorithm::most_recent : quire::AmaxAlgorithm::max,
          .margin = static_cast<int>(a.margin)};
}

void check_entries(const DelayedUpdate::Args& a) {
  const size_t n = a.history.value.size();
  const std::array sizes{a.scale.value.size(), a.amax.value.size(), a.state_rule.size(), a.largest.size()};
  check(std::all_of(sizes.begin(), sizes.end(), [&](size_t s) { return s == n; }) &&
            (a.reduced.empty() || a.reduced.size() == n),
        "delayed_update_: every list must have one entry a state; got ", n, " of history, ", sizes[0], " of scale, ",
        sizes[1], " of amax, ", sizes[2], " of state_rule, ", sizes[3], " of largest, ", a.reduced.size(),
        " of reduced (which may have none)");
  check(a.length >= 1, "delayed_update_: length must be at least 1, got ", a.length);
  check_rule(a.rule, "delayed_update_: rule");
  for (size_t i = 0; i < n; ++i) {
    const at::Tensor& h = a.history.value[i];
    check(h.scalar_type() == at::kFloat && h.dim() == 2 && h.size(0) >= a.length && h.is_contiguous(),
          "delayed_update_: a history must be contiguous float32 of at least length = ", a.length, " rows, got ",
          h.scalar_type(), " ", h.sizes());
    check_vector(a.scale.value[i], h.size(1), "delayed_update_: scale");
    check_vector(a.amax.value[i], h.size(1), "delayed_update_: amax");
    if (!a.reduced.empty()) check_vector(a.reduced[i], h.size(1), "delayed_update_: reduced");
    check_rule(a.state_rule[i], "delayed_update_: state_rule");
  }
}

/// One state, slot by slot: its amaxes become row 0, which the update rolls on.
void end_step(const DelayedUpdate::Args& a, const quire::DelayedRule& rule, size_t i) {
  const at::Tensor& h = a.history.value[i];
  const int64_t slots = h.size(1), rows = h.size(0);
  auto* history = static_cast<float*>(h.mutable_data_ptr());
  auto* scale = static_cast<float*>(a.scale.value[i].mutable_data_ptr());
  auto* amax = static_cast<float*>(a.amax.value[i].mutable_data_ptr());
  const float* reduced = a.reduced.empty() ? amax : a.reduced[i].const_data_ptr<float>();
  std::fill(history + a.length * slots, history + rows * slots, 0.0F);
  for (int64_t s = 0; s < slots; ++s) {
    history[s] = amax[s];
    scale[s] =
        quire::delayed_update(rule, {.data = history + s, .length = a.length, .stride = slots}, reduced[s], scale[s]);
    amax[s] = history[s];
  }
}

}  // namespace

void DelayedCollect::cpu(const Args& a) {
  const at::Tensor& amax = a.amax.value;
  check(amax.scalar_type() == at::kFloat && amax.dim() == 1 && amax.size(0) >= 2 && amax.is_contiguous(),
        "delayed_collect_: amax must be a contiguous float32 vector of x, w and y, got ", amax.scalar_type(), " ",
        amax.sizes());
  check_rule(a.state_rule.value, "delayed_collect_: state_rule");
  check_rule(a.rule, "delayed_collect_: rule");
  check_vector(a.x_amax, 1, "delayed_collect_: x_amax");
  if (a.w_amax) check_vector(*a.w_amax, 1, "delayed_collect_: w_amax");
  auto* slots = static_cast<float*>(amax.mutable_data_ptr());
  collect(slots[0], a.x_amax);
  if (a.w_amax) collect(slots[1], *a.w_amax);
  *static_cast<int64_t*>(a.state_rule.value.mutable_data_ptr()) = *a.rule.const_data_ptr<int64_t>();
}

void DelayedUpdate::cpu(const Args& a) {
  const quire::FloatMode mode;
  quire::DelayedRule rule = rule_of(a);
  check_entries(a);
  const int64_t number = *a.rule.const_data_ptr<int64_t>();
  for (size_t i = 0; i < a.history.value.size(); ++i) {
    if (*a.state_rule[i].const_data_ptr<int64_t>() != number) continue;
    rule.largest = static_cast<float>(a.largest[i]);
    end_step(a, rule, i);
  }
}

}  // namespace quire_torch
