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

/// What this rank is about to say to its group. what: identifies it. tokens: null if it has no number of them.
struct Saying {
  std::string_view group;
  size_t what;
  const int64_t* tokens = nullptr;
};

/// Unless the ranks have said the same last, calls a comparison that Python implements, with values(), and remembers
/// it. What was said in other layers stays known: ranks that then say two different things which all have said before
/// do not compare them.
template <class Values>
void say(const Saying& saying, at::Device device, const char* comparison, const Values& values) {
  Groups& g = groups();
  {
    const std::lock_guard lock(g.mutex);
    const auto known = g.said.find(saying.group);
    if (known != g.said.end() && (!saying.tokens || known->second.tokens == *saying.tokens) &&
        known->second.layers.contains(saying.what))
      return;
  }
  if (!sent_by_gloo(saying.group, device)) return;
  torch::jit::Stack stack = values();
  call_python(comparison, stack);
  const std::lock_guard lock(g.mutex);
  Said& now = g.said[std::string(saying.group)];
  if (saying.tokens) now.tokens = *saying.tokens;
  now.layers.insert(saying.what);
}

}  // namespace

void Agree::run(const Args& a, const quire::Context&) {
  quire::check(a.parallel->has_value(), "agree_: parallel must say how the layer is sharded, got ''");
  const Parallel& p = **a.parallel;
  const auto rows = op::as<int64_t>(a.tokens);
  // Of all ranks, which a column and a row layer have in common. Modulo 2^64: any number is taken.
  const uint64_t times = p.column && p.sequence ? static_cast<uint64_t>(p.group.size) : 1;
  const auto tokens = static_cast<int64_t>(static_cast<uint64_t>(rows) * times);
  say({p.group.name, layer_of(a), &tokens}, a.t.value.device(), "quire::compare_ranks", [&] {
    return torch::jit::Stack{p.group.name, rows,
                             std::vector{op::as<int64_t>(a.out_features), op::as<int64_t>(a.in_features)},
                             std::string(a.recipe.text()), std::string(a.parallel.text())};
  });
}

void AgreeOn::run(const Args& a, const quire::Context&) {
  const std::string_view group = a.group.text(), fields = a.fields.text();
  say({group, reinterpret_cast<size_t>(fields.data())}, a.t.value.device(), "quire::compare_fields",
      [&] { return torch::jit::Stack{std::string(group), std::string(fields)}; });
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
