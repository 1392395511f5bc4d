// Memory of a call that later calls use again.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <span>
#include <vector>

#include "quire/base/context.h"
#include "quire/spec/problem.h"

namespace quire {

/// Bytes of the rowwise data, scale and amax of a quantized [rows, cols].
std::array<int64_t, 3> rowwise_bytes(const QuantSpec& spec, int64_t rows, int64_t cols);

/// Gives memory out of few large blocks, and takes all of it back at once. When it has seen what a call takes, twice,
/// the next such call allocates nothing.
class Arena final : public Workspace {
 public:
  /// Uninitialised and 64-byte aligned, never null; valid until reset().
  void* take_bytes(int64_t count);
  template <class T>
  T* take(int64_t count) {
    return static_cast<T*>(take_bytes(times(count, static_cast<int64_t>(sizeof(T)))));
  }
  /// A contiguous matrix.
  MutableMatrix take_matrix(DType dtype, int64_t rows, int64_t cols) {
    return {take_bytes(times(times(rows, cols), size_of(dtype))), dtype, rows, cols, cols};
  }
  /// The rowwise buffers of a quantized [rows, cols].
  Side take_rowwise(const QuantSpec& spec, int64_t rows, int64_t cols);
  /// The same for each group of `rows` rows, whose ends are given: as much memory however they are divided.
  std::span<Side> take_rowwise(const QuantSpec& spec, std::span<const int32_t> ends, int64_t rows, int64_t cols);

  /// Allocates nothing: several blocks become one when the next call takes memory.
  void reset();
  void* allocate(int64_t bytes) override { return take_bytes(bytes); }
  /// What it holds, in use or not.
  int64_t capacity() const;

 private:
  static constexpr int64_t kAlign = 64;
  struct Free {
    void operator()(std::byte* p) const { ::operator delete(p, std::align_val_t{kAlign}); }
  };
  struct Block {
    std::unique_ptr<std::byte, Free> memory;
    int64_t size;
  };
  void add_block(int64_t size);

  std::vector<Block> blocks_;
  int64_t used_ = 0;    ///< of the last block
  int64_t merged_ = 0;  ///< size of the block that stands for those that reset() gave back
};

/// An arena of this process for as long as it is held; afterwards somebody else's. There are as many as were ever held
/// at once, and they are shared by all runners: layers that run one after another use the same memory.
class HeldArena {
 public:
  HeldArena();
  ~HeldArena();
  HeldArena(const HeldArena&) = delete;
  HeldArena& operator=(const HeldArena&) = delete;

  Arena& operator*() const { return *arena_; }
  Arena* operator->() const { return arena_.get(); }

 private:
  std::unique_ptr<Arena> arena_;
};

/// Bytes of the arenas that nobody holds, and how to give them back to the process.
int64_t idle_arena_bytes();
void release_idle_arenas();

}  // namespace quire
