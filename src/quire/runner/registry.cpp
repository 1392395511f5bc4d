#include "quire/runner/registry.h"

#include <algorithm>
#include <map>
#include <mutex>

#include "quire/base/check.h"
#include "quire/base/lazy.h"
#include "quire/base/process_mutex.h"
#include "quire/device/place.h"
#include "quire/spec/check_problem.h"

namespace quire {
namespace {

struct Registry {
  ProcessMutex mutex;
  int64_t last_handle = 0;
  std::map<int64_t, RegisteredRunnerPtr> by_handle;
  std::map<std::string, RegisteredRunnerPtr, std::less<>> by_name;
};

Registry& registry() {
  static constinit Lazy<Registry> one;
  return one.get();
}

std::string title(const RegisteredRunner& r) {
  return r.name.empty() ? std::to_string(r.handle) : text(r.handle, " '", r.name, "'");
}

/// What the errors say of a registry that is locked.
std::string listing_locked(const Registry& r) {
  constexpr size_t kShown = 8;
  if (r.by_handle.empty()) return "none is registered in this process";
  std::string out;
  size_t shown = 0;
  for (const auto& [handle, entry] : r.by_handle) {
    if (shown++ == kShown) break;
    const RunnerInfo& info = entry->runner->info();
    out += text(out.empty() ? "registered: " : ", ", title(*entry), " (", name(info.kind), ", ", info.device, ")");
  }
  return r.by_handle.size() > kShown ? text(out, " and ", r.by_handle.size() - kShown, " more") : out;
}

std::string listing() {
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  return listing_locked(r);
}

void check_info(const RunnerInfo& info) {
  const bool moe = info.kind == RunnerKind::moe;
  check(info.in_features >= 1 && info.out_features >= 1 && (!moe || info.experts >= 1),
        "register_runner: in_features, out_features and experts (of a moe) must be at least 1; got ", info.in_features,
        ", ", info.out_features, " and ", info.experts, "; say the sizes in the runner's info");
  check(!info.device.empty(), "register_runner: the runner names no device; say \"cpu\" or \"cuda:0\" in its info");
}

void check_ids(std::string_view op, const RunnerCall& call, int64_t experts) {
  for (int64_t i = 0; i < times(call.x.rows, call.top_k); ++i) {
    const int32_t id = call.expert_ids[i];
    if (id >= -1 && id < experts) continue;
    fail(op, ": topk_ids must be in [0, ", experts, "), or -1 for no expert; got ", id, " for token ", i / call.top_k,
         ", choice ", i % call.top_k);
  }
}

}  // namespace

int64_t register_runner(std::shared_ptr<Runner> runner, std::string_view name) {
  check(runner != nullptr, "register_runner: got a null pointer; pass a runner");
  check_info(runner->info());
  check(std::none_of(name.begin(), name.end(), [](unsigned char c) { return c < ' '; }), "register_runner: the name '",
        name, "' has control characters; choose another");
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  if (const auto taken = r.by_name.find(name); !name.empty() && taken != r.by_name.end())
    fail("register_runner: the name '", name, "' belongs to runner ", taken->second->handle,
         "; unregister that one first, or choose another name");
  const int64_t handle = ++r.last_handle;
  const auto entry = std::make_shared<const RegisteredRunner>(
      RegisteredRunner{.handle = handle, .name = std::string(name), .runner = std::move(runner)});
  r.by_handle.emplace(handle, entry);
  if (!name.empty()) r.by_name.emplace(name, entry);
  return handle;
}

void unregister_runner(int64_t handle) {
  Registry& r = registry();
  RegisteredRunnerPtr last;  // whose destructor, somebody else's code, runs without the lock
  const std::lock_guard lock(r.mutex);
  const auto found = r.by_handle.find(handle);
  if (found == r.by_handle.end())
    fail("unregister_runner: no runner is registered as ", handle, "; ", listing_locked(r), "; unregister each once");
  last = std::move(found->second);
  r.by_handle.erase(found);
  if (!last->name.empty()) r.by_name.erase(last->name);
}

RegisteredRunnerPtr registered_runner(int64_t handle) {
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  const auto found = r.by_handle.find(handle);
  return found == r.by_handle.end() ? nullptr : found->second;
}

RegisteredRunnerPtr find_runner(std::string_view op, int64_t handle) {
  if (RegisteredRunnerPtr found = registered_runner(handle)) [[likely]]
    return found;
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  const bool stale = handle >= 1 && handle <= r.last_handle;
  fail(op, ": no runner has the handle ", handle, stale ? " any more, it was unregistered; " : "; ", listing_locked(r),
       "; register one in this process and keep it registered while it is used");
}

RegisteredRunnerPtr find_runner(std::string_view op, std::string_view name) {
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  const auto found = r.by_name.find(name);
  if (found == r.by_name.end()) [[unlikely]]
    fail(op, ": no runner has the name '", name, "'; ", listing_locked(r),
         "; register one under that name in this process and keep it registered while it is used");
  return found->second;
}

std::vector<RegisteredRunnerPtr> registered_runners() {
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  std::vector<RegisteredRunnerPtr> out;
  for (const auto& [handle, entry] : r.by_handle) out.push_back(entry);
  return out;
}

void check_request(const RegisteredRunner& registered, const RunnerRequest& request) {
  // Texts of errors cost more than a small call: they are made only for one.
  const RunnerInfo& info = registered.runner->info();
  const RunnerCall& call = request.call;
  check_matrix(request.op, "x", call.x);
  check_matrix(request.op, "the result", call.out);
  if (info.kind != request.kind)
    fail(request.op, ": runner ", title(registered), " is of kind ", name(info.kind), ", and this operator needs ",
         name(request.kind), "; ", listing(), "; pass one of that kind");
  if (const std::string place = place_of(call.context); info.device != place)
    fail(request.op, ": runner ", title(registered), " computes on ", info.device, " and x lies on ", place, "; ",
         listing(), "; move x, or register a runner for ", place);
  if (call.x.cols != info.in_features || call.out.cols != info.out_features)
    fail(request.op, ": runner ", title(registered), " takes ", info.in_features, " features and gives ",
         info.out_features, "; got x with ", call.x.cols, " and a result of ", call.out.cols, "; ", listing(),
         "; pass what fits it, or another runner");
  if (request.kind == RunnerKind::linear) return;
  if (call.top_k < 1 || call.top_k > info.experts)
    fail(request.op, ": runner ", title(registered), " has ", info.experts, " experts, of which a token chooses 1 to ",
         info.experts, "; got ", call.top_k, " choices per token");
  if (on_host(call.context)) check_ids(request.op, call, info.experts);
}

void run(const RegisteredRunner& registered, const RunnerRequest& request) {
  check_request(registered, request);
  if (request.call.x.rows > 0) registered.runner->run(request.call);
}

}  // namespace quire
