// The runners of this process, by number and by name. All functions may be called from any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "quire/runner/runner.h"

namespace quire {

/// A runner and what it goes by. Who holds one keeps the runner alive, registered or not.
struct RegisteredRunner {
  int64_t handle = 0;
  std::string name;  ///< empty: it goes by its handle alone
  std::shared_ptr<Runner> runner;
};
using RegisteredRunnerPtr = std::shared_ptr<const RegisteredRunner>;

/// Makes a runner available to operators. Returns its handle, a number above 0 that this process gives only once, so
/// that a stale one never means another runner. The name is for programs that cannot know the number, such as
/// exported ones. Throws Error for a null pointer, sizes below 1, a name with control characters and one that is taken.
/// A shared library that registers a runner must stay loaded. A forked child has its parent's runners; any other
/// process registers its own.
int64_t register_runner(std::shared_ptr<Runner> runner, std::string_view name = {});

/// The runner that was registered becomes unknown; calls that are running end as they would have. Throws Error if the
/// handle is not registered.
void unregister_runner(int64_t handle);

/// Throws Error, beginning with `op` and listing what is registered, if there is none.
RegisteredRunnerPtr find_runner(std::string_view op, int64_t handle);
RegisteredRunnerPtr find_runner(std::string_view op, std::string_view name);

/// Null if there is none.
RegisteredRunnerPtr registered_runner(int64_t handle);

/// In order of handles.
std::vector<RegisteredRunnerPtr> registered_runners();

/// What a call asks for.
struct RunnerRequest {
  std::string_view op;  ///< for errors
  RunnerKind kind = RunnerKind::linear;
  RunnerCall call;
};

/// Throws Error if the runner is of another kind or device, sizes do not fit it, top_k is not in [1, E], or, where the
/// host can read them, an expert id is not in [-1, E).
void check_request(const RegisteredRunner& registered, const RunnerRequest& request);

/// Checks the request and runs it, unless T is 0.
void run(const RegisteredRunner& registered, const RunnerRequest& request);

}  // namespace quire
