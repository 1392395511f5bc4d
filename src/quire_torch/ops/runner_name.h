// The name of a runner as an operator's argument.
#pragma once

#include <atomic>
#include <memory>

#include "quire/runner/registry.h"
#include "quire_torch/bridge/text.h"

namespace quire_torch {

/// Looked up once per process and name, and again only when that runner is no longer registered: handles are never
/// given twice, so a kept one cannot mean another runner.
struct RunnerName {
  std::string name;
  std::shared_ptr<std::atomic<int64_t>> handle = std::make_shared<std::atomic<int64_t>>(0);

  static RunnerName parse(std::string_view text) { return {std::string(text)}; }
  std::string to_string() const { return name; }
};

using RunnerNameText = Interned<RunnerName>;

/// The runner that an argument names. Throws, beginning with `op`, if there is none.
quire::RegisteredRunnerPtr find_runner(const char* op, const c10::SymInt& handle);
quire::RegisteredRunnerPtr find_runner(const char* op, const RunnerNameText& name);

}  // namespace quire_torch
