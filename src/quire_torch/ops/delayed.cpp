#include "quire_torch/ops/delayed.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "quire/base/float_mode.h"
#include "quire/spec/delayed.h"

namespace quire_torch {
namespace {

using quire::check;

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

void collect(float* slots, const at::Tensor& values) {
  const float* value = values.const_data_ptr<float>();
  for (int64_t i = 0; i < values.numel(); ++i) slots[i] = std::fmax(slots[i], value[i]);
}

/// The row of a state's rule in the table, or null.
const double* find_rule(const at::Tensor& rules, const at::Tensor& usage) {
  const auto number = static_cast<double>(*usage.const_data_ptr<int64_t>());
  const double* row = rules.const_data_ptr<double>();
  for (int64_t i = 0; i < rules.size(0) && row[kNumber] != 0; ++i, row += kRuleColumns)
    if (row[kNumber] == number) return row;
  return nullptr;
}

void check_entries(const DelayedUpdate::Args& a) {
  const size_t n = a.history.value.size();
  const std::array sizes{a.scale.value.size(), a.amax.value.size(), a.usage.value.size()};
  check(std::all_of(sizes.begin(), sizes.end(), [&](size_t s) { return s == n; }) &&
            (a.reduced.empty() || a.reduced.size() == n),
        "delayed_update_: every list must have one entry a state; got ", n, " of history, ", sizes[0], " of scale, ",
        sizes[1], " of amax, ", sizes[2], " of usage, ", a.reduced.size(), " of reduced (which may have none)");
  check(a.rules.scalar_type() == at::kDouble && a.rules.dim() == 2 && a.rules.size(1) == kRuleColumns &&
            a.rules.is_contiguous(),
        "delayed_update_: rules must be a contiguous float64 table of ", int64_t{kRuleColumns}, " columns, got ",
        a.rules.scalar_type(), " ", a.rules.sizes());
  for (size_t i = 0; i < n; ++i) {
    const at::Tensor& h = a.history.value[i];
    check(h.scalar_type() == at::kFloat && h.dim() == 2 && h.is_contiguous(),
          "delayed_update_: a history must be a contiguous float32 matrix, got ", h.scalar_type(), " ", h.sizes());
    check_vector(a.scale.value[i], h.size(1), "delayed_update_: scale");
    check_vector(a.amax.value[i], h.size(1), "delayed_update_: amax");
    if (!a.reduced.empty()) check_vector(a.reduced[i], h.size(1), "delayed_update_: reduced");
    check_usage(a.usage.value[i], "delayed_update_: usage");
    const double* rule = find_rule(a.rules, a.usage.value[i]);
    check(!rule || (rule[kLength] >= 1 && rule[kLength] <= static_cast<double>(h.size(0))),
          "delayed_update_: a rule's length must be from 1 to the rows of the history, ", h.size(0), "; got ",
          rule ? rule[kLength] : 0);
  }
}

/// One state, slot by slot: its amaxes become row 0, which the update rolls on.
void end_step(const DelayedUpdate::Args& a, size_t i, const double* row) {
  const quire::DelayedRule rule{
      .algorithm = row[kMostRecent] != 0 ? quire::AmaxAlgorithm::most_recent : quire::AmaxAlgorithm::max,
      .largest = static_cast<float>(row[a.backward ? kLargestBackward : kLargestForward]),
      .margin = static_cast<int>(row[kMargin])};
  const at::Tensor& h = a.history.value[i];
  const int64_t slots = h.size(1), rows = h.size(0), length = static_cast<int64_t>(row[kLength]);
  auto* history = static_cast<float*>(h.mutable_data_ptr());
  auto* scale = static_cast<float*>(a.scale.value[i].mutable_data_ptr());
  auto* amax = static_cast<float*>(a.amax.value[i].mutable_data_ptr());
  const float* reduced = a.reduced.empty() ? amax : a.reduced[i].const_data_ptr<float>();
  int64_t& in_use = usage_of(a.usage.value[i])[a.backward ? 2 : 1];
  if (in_use > length) std::fill(history + length * slots, history + std::min(in_use, rows) * slots, 0.0F);
  in_use = length;
  for (int64_t s = 0; s < slots; ++s) {
    history[s] = amax[s];
    scale[s] =
        quire::delayed_update(rule, {.data = history + s, .length = length, .stride = slots}, reduced[s], scale[s]);
    amax[s] = history[s];
  }
}

}  // namespace

void DelayedCollect::cpu(const Args& a) {
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
  auto* slots = static_cast<float*>(amax.mutable_data_ptr());
  collect(slots, a.x_amax);
  if (a.w_amax) collect(slots + groups, *a.w_amax);
  usage_of(a.usage.value)[0] = *rule.const_data_ptr<int64_t>();
}

void DelayedUpdate::cpu(const Args& a) {
  const quire::FloatMode mode;
  check_entries(a);
  for (size_t i = 0; i < a.history.value.size(); ++i)
    if (const double* rule = find_rule(a.rules, a.usage.value[i])) end_step(a, i, rule);
}

}  // namespace quire_torch
