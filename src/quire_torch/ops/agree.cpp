#include "quire_torch/ops/agree.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/clone.h>

#include <map>
#include <mutex>
#include <string>
#include <unordered_set>
#include <utility>

#include "quire/base/lazy.h"
#include "quire/base/process_mutex.h"
#include "quire_torch/op/op.h"
#include "quire_torch/ops/linear_grads.h"

namespace quire_torch {
namespace {

/// What all ranks of a group have said, and what sends their tensors. Only the last number of tokens: if ranks
/// remembered several, one could come with the first and one with the second, each known to both, and neither would
/// ask.
struct Said {
  int64_t tokens = -1;
  std::unordered_set<size_t> layers;
  std::map<c10::DeviceType, bool> by_gloo;
};

struct Groups {
  quire::ProcessMutex mutex;
  std::map<std::string, Said, std::less<>> said;
};

Groups& groups() {
  static constinit quire::Lazy<Groups> one;
  return one.get();
}

thread_local std::optional<Agree::Args> pending;

bool is_traced(const at::Tensor& t) { return op::detail::is_traced(Tie::Args{.t = t, .after = t}); }

/// Calls a function that Python implements; false where there is no Python.
bool call_python(const char* name, torch::jit::Stack& stack) {
  const auto found = c10::Dispatcher::singleton().findSchema({name, ""});
  if (!found || !found->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd)) return false;
  found->callBoxed(stack);
  return true;
}

size_t layer_of(const Agree::Args& a) {
  size_t found = 0;
  // Texts by their address: an interned text has one.
  for (const auto part :
       {reinterpret_cast<size_t>(a.recipe.text().data()), reinterpret_cast<size_t>(a.parallel.text().data()),
        static_cast<size_t>(op::as<int64_t>(a.in_features)), static_cast<size_t>(op::as<int64_t>(a.out_features))})
    found = found * 0x9E3779B97F4A7C15 + part;
  return found;
}

}  // namespace

void Agree::run(const Args& a, const quire::Context&) {
  quire::check(a.parallel->has_value(), "agree_: parallel must say how the layer is sharded, got ''");
  const Parallel& p = **a.parallel;
  const auto rows = op::as<int64_t>(a.tokens);
  // Of all ranks, which a column and a row layer have in common. Modulo 2^64: any number is taken.
  const uint64_t times = p.column && p.sequence ? static_cast<uint64_t>(p.group.size) : 1;
  const auto tokens = static_cast<int64_t>(static_cast<uint64_t>(rows) * times);
  const size_t layer = layer_of(a);
  Groups& g = groups();
  {
    const std::lock_guard lock(g.mutex);
    const auto known = g.said.find(p.group.name);
    if (known != g.said.end() && known->second.tokens == tokens && known->second.layers.contains(layer)) return;
  }
  if (!sent_by_gloo(p.group.name, a.t.value.device())) return;
  torch::jit::Stack stack{p.group.name, rows,
                          std::vector{op::as<int64_t>(a.out_features), op::as<int64_t>(a.in_features)},
                          std::string(a.recipe.text()), std::string(a.parallel.text())};
  call_python("quire::compare_ranks", stack);
  const std::lock_guard lock(g.mutex);
  Said& now = g.said[p.group.name];
  now.tokens = tokens;
  now.layers.insert(layer);
}

void AgreeOn::run(const Args& a, const quire::Context&) {
  const auto fields = reinterpret_cast<size_t>(a.fields.text().data());
  Groups& g = groups();
  {
    const std::lock_guard lock(g.mutex);
    const auto known = g.said.find(a.group.text());
    if (known != g.said.end() && known->second.layers.contains(fields)) return;
  }
  if (!sent_by_gloo(a.group.text(), a.t.value.device())) return;
  torch::jit::Stack stack{std::string(a.group.text()), std::string(a.fields.text())};
  call_python("quire::compare_fields", stack);
  const std::lock_guard lock(g.mutex);
  g.said[std::string(a.group.text())].layers.insert(fields);
}

bool sent_by_gloo(std::string_view group, at::Device device) {
  Groups& g = groups();
  {
    const std::lock_guard lock(g.mutex);
    const auto known = g.said.find(group);
    if (known != g.said.end())
      if (const auto found = known->second.by_gloo.find(device.type()); found != known->second.by_gloo.end())
        return found->second;
  }
  torch::jit::Stack stack{std::string(group), device.str()};
  const bool by_gloo = call_python("quire::sent_by_gloo", stack) && stack[0].toBool();
  const std::lock_guard lock(g.mutex);
  return g.said[std::string(group)].by_gloo[device.type()] = by_gloo;
}

Agreement::Agreement(const std::string& layer, Agree::Args what) : outer_(std::exchange(pending, std::nullopt)) {
  const Group& group = (*what.parallel)->group;
  if (!layer.empty()) return;
  if (!is_traced(what.t.value) || (group.size > 1 && sent_by_gloo(group.name, what.t.value.device())))
    pending = std::move(what);
}
Agreement::~Agreement() { pending = std::move(outer_); }

void agree_before(const at::Tensor& t) {
  if (!pending) return;
  Agree::Args a = *std::exchange(pending, std::nullopt);
  a.t.value = t;
  op::call<Agree>(a);
}

at::Tensor agreed(const at::Tensor& t) {
  if (!pending) return t;
  at::Tensor own = is_traced(t) ? t.clone() : t;
  agree_before(own);
  return own;
}

void forget_agreed(c10::string_view group) {
  Groups& g = groups();
  const std::lock_guard lock(g.mutex);
  if (const auto known = g.said.find(std::string_view(group)); known != g.said.end()) g.said.erase(known);
}

}  // namespace quire_torch
