// How rows start kernels.
#pragma once

#include <algorithm>
#include <span>
#include <type_traits>

#include "quire/base/check.h"
#include "quire/cuda/driver.h"
#include "quire/cuda/kernels/fault_site.h"

namespace quire::cuda {

/// Threads of a block, where the kernel does not ask for a number.
inline constexpr unsigned kBlockThreads = 128;

/// A thread for each piece of work, or for several where there are many: kernels use each_of() of threads.cuh.
inline Grid grid_of(int64_t work, unsigned threads = kBlockThreads) {
  constexpr int64_t most = 1 << 16;
  return {.blocks = static_cast<unsigned>(std::clamp<int64_t>((work + threads - 1) / threads, 1, most)),
          .threads = threads};
}

/// Launches a kernel that takes one `Job`: plain data, whose pointers are memory of the device.
template <class Job>
void launch(const Kernel& kernel, const Grid& grid, const Job& job, const Context& context) {
  static_assert(std::is_trivially_copyable_v<Job>, "parameters of a kernel are copied byte by byte");
  static_assert(sizeof(Job) <= 4096, "parameters of a kernel have 4096 bytes");
  driver().launch(kernel, grid, &job, sizeof(Job), context);
}

inline void fill(void* memory, uint8_t value, int64_t bytes, const Context& context) {
  if (memory && bytes > 0) driver().fill(memory, value, bytes, context);
}

/// Where kernels of this context report values that break a rule, under the operation's name in errors.
inline FaultSite fault_site(const Context& context, std::string_view operation) {
  FaultSite site{.record = context.faults};
  operation.copy(site.operation.data(), site.operation.size() - 1);
  return site;
}

/// Memory for `count` elements of T until the call's kernels have run. Throws Error if the context lends none.
template <class T>
T* lend(const Context& context, int64_t count) {
  check(context.workspace != nullptr, "cuda: the context has no workspace; lend memory of the device");
  return static_cast<T*>(context.workspace->allocate(std::max<int64_t>(count, 1) * static_cast<int64_t>(sizeof(T))));
}

/// The same, beginning at a multiple of `alignment` bytes.
inline void* lend_aligned(const Context& context, int64_t bytes, int64_t alignment) {
  const auto lent = reinterpret_cast<uintptr_t>(lend<uint8_t>(context, bytes + alignment));
  const auto to = static_cast<uintptr_t>(alignment);
  return reinterpret_cast<void*>((lent + to - 1) / to * to);
}

}  // namespace quire::cuda
