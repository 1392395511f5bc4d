// Memory for the time of a call on the host.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "quire/base/context.h"
#include "quire/base/shape.h"

namespace quire::cpu {

/// `count` uninitialised elements until this ends: its own if they are few, of the context's workspace, or where it has
/// none, of the heap.
template <class T>
class WorkspaceSpan {
 public:
  WorkspaceSpan(const Context& context, int64_t count) {
    const auto size = static_cast<size_t>(count);
    if (size <= kFew) {
      span_ = {few_, size};
    } else if (context.workspace) {
      span_ = {static_cast<T*>(context.workspace->allocate(times(count, static_cast<int64_t>(sizeof(T))))), size};
    } else {
      own_ = std::make_unique_for_overwrite<T[]>(size);
      span_ = {own_.get(), size};
    }
  }
  WorkspaceSpan(const WorkspaceSpan&) = delete;
  WorkspaceSpan& operator=(const WorkspaceSpan&) = delete;
  operator std::span<T>() const { return span_; }

 private:
  static constexpr size_t kFew = 256 / sizeof(T);

  T few_[kFew];
  std::unique_ptr<T[]> own_;
  std::span<T> span_;
};

}  // namespace quire::cpu
