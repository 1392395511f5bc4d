#include "quire_torch/ops/state.h"

#include <ATen/ops/clone.h>

#include <deque>
#include <map>
#include <mutex>
#include <optional>

#include "quire/base/lazy.h"
#include "quire/base/process_mutex.h"
#include "quire/operations/operations.h"
#include "quire_torch/op/device.h"
#include "quire_torch/op/op.h"

namespace quire_torch {
namespace {

using Stashed = std::tuple<op::TensorList, int64_t, std::string, bool>;

struct Stashes {
  quire::ProcessMutex mutex;
  std::map<int64_t, std::deque<Stashed>> kept;
};

Stashes& stashes() {
  static constinit quire::Lazy<Stashes> one;
  return one.get();
}

/// More calls than any process waits with, so that counting one more never overflows.
constexpr int64_t kMostStashed = int64_t{1} << 62;

int64_t* check_stash(const at::Tensor& t, const char* op) {
  const bool dense = t.layout() == at::kStrided && !t.is_nested() && !t.is_quantized() && !t._is_zerotensor();
  quire::check(op::on_host(t.device()) && dense, op, ": stash must be a dense tensor on the CPU, got one ",
               t.is_nested() ? "that is nested" : quire::text("of layout ", t.layout()), " on ", t.device(),
               "; use the one that wgrad_stash_ wrote");
  quire::check(t.scalar_type() == at::kLong && t.sizes() == at::IntArrayRef({2}) && t.is_contiguous(), op,
               ": stash must be a contiguous int64 [2] tensor {number, count}, got ", t.scalar_type(), " ", t.sizes());
  std::optional<at::Device> place;
  op::detail::check_memory(t, place, {op, "stash"});
  auto* stash = static_cast<int64_t*>(t.mutable_data_ptr());
  quire::check(stash[1] >= 0 && stash[1] < kMostStashed, op, ": the count of stash must be from 0 to ",
               kMostStashed - 1, ", got {", stash[0], ", ", stash[1], "}; use the one that wgrad_stash_ wrote");
  return stash;
}

}  // namespace

void check_sr_state(const at::Tensor& state) {
  quire::check(state.scalar_type() == at::kLong && state.sizes() == at::IntArrayRef({2}) && state.is_contiguous(),
               "linear: sr_state must be a contiguous int64 [2] tensor {seed, counter}, got ", state.scalar_type(), " ",
               state.sizes());
}

void SrAdvance::run(const Args& a, const quire::Context& context) {
  check_sr_state(a.sr_state.value);
  quire::advance({.value = static_cast<int64_t*>(a.sr_state.value.mutable_data_ptr()) + 1}, context);
}

void AmaxMax::run(const Args& a, const quire::Context& context) {
  const at::Tensor& amax = a.amax.value;
  quire::check(amax.scalar_type() == at::kFloat && amax.dim() == 1 && amax.is_contiguous(),
               "amax_max_: amax must be a contiguous float32 vector, got ", amax.scalar_type(), " ", amax.sizes());
  const int64_t n = a.value.numel();
  quire::check(a.value.scalar_type() == at::kFloat && a.value.is_contiguous() && n > 0 && amax.size(0) % n == 0,
               "amax_max_: value must be contiguous float32, one for each group of amax ", amax.sizes(), ", got ",
               a.value.scalar_type(), " ", a.value.sizes());
  quire::check(a.slot >= 0 && a.slot < amax.size(0) / n, "amax_max_: slot must be in [0, ", amax.size(0) / n, "), got ",
               a.slot);
  quire::maximum({.to = static_cast<float*>(amax.mutable_data_ptr()) + a.slot * n,
                  .values = a.value.const_data_ptr<float>(),
                  .count = n},
                 context);
}

void WgradStash::run(const Args& a, const quire::Context&) {
  int64_t* stash = check_stash(a.stash.value, "wgrad_stash_");
  op::TensorList copies;
  for (const at::Tensor& t : a.operands) copies.push_back(t.clone());
  Stashed call(std::move(copies), op::as<int64_t>(a.tokens), a.recipe.text(), a.overwrite);
  Stashes& s = stashes();
  const std::lock_guard lock(s.mutex);
  s.kept[stash[0]].push_back(std::move(call));
  ++stash[1];
}

void keep_operands(const WgradStash::Args& a) {
  if (!a.operands.front().is_meta()) op::call<WgradStash>(a);
}

Stashed take_stashed(const at::Tensor& t) {
  int64_t* stash = check_stash(t, "wgrad_take_");
  Stashes& s = stashes();
  const std::lock_guard lock(s.mutex);
  const auto found = s.kept.find(stash[0]);
  if (found == s.kept.end()) return {};
  Stashed oldest = std::move(found->second.front());
  found->second.pop_front();
  if (found->second.empty()) s.kept.erase(found);
  if (stash[1] > 0) --stash[1];  // another tensor of this number may have counted this call
  return oldest;
}

void drop_stashed(int64_t number) {
  decltype(Stashes::kept)::node_type dropped;  // tensors, whose end may be somebody else's code
  Stashes& s = stashes();
  const std::lock_guard lock(s.mutex);
  dropped = s.kept.extract(number);
}

}  // namespace quire_torch
