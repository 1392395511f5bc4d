// Output memory between guard bytes, so that a write outside it is seen.
#pragma once

#include <algorithm>
#include <cstdint>

#include "here.h"

namespace quire::testing {

class Guarded {
 public:
  explicit Guarded(int64_t bytes = 0) : memory_(static_cast<size_t>(bytes) + 2 * kGuard, kGuardByte) {
    std::fill(begin(), end(), kUnwritten);
  }

  void* data() { return memory_.data() + kGuard; }
  const void* data() const { return memory_.data() + kGuard; }
  template <class T>
  T* as() {
    return static_cast<T*>(data());
  }
  template <class T>
  const T* as() const {
    return static_cast<const T*>(data());
  }
  int64_t size() const { return static_cast<int64_t>(memory_.size() - 2 * kGuard); }

  /// True while nothing outside has been written.
  bool intact() const {
    const auto guard = [](uint8_t byte) { return byte == kGuardByte; };
    return std::all_of(memory_.begin(), memory_.begin() + kGuard, guard) &&
           std::all_of(memory_.end() - kGuard, memory_.end(), guard);
  }

 private:
  static constexpr size_t kGuard = 128;
  static constexpr uint8_t kGuardByte = 0xA5, kUnwritten = 0xCD;
  uint8_t* begin() { return memory_.data() + kGuard; }
  uint8_t* end() { return memory_.data() + memory_.size() - kGuard; }

  Array<uint8_t> memory_;
};

}  // namespace quire::testing
