// Where tests compute: on the host, or where the library that QUIRE_TEST_PLACE names does (tests/device/place.cpp).
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <vector>

#include "quire/base/check.h"
#include "quire/base/context.h"

namespace quire::testing {

/// Memory that the host reads and writes, and that problems of `context` may point to.
struct Place {
  const Context& context;
  void* (*allocate)(size_t bytes);
  void (*release)(void* memory);
};

/// Null: the host.
inline const Place* elsewhere() {
  static const Place* const place = [] {
    const char* const library = std::getenv("QUIRE_TEST_PLACE");
    if (!library) return static_cast<const Place*>(nullptr);
    void* const opened = dlopen(library, RTLD_NOW);
    check(opened, "QUIRE_TEST_PLACE=", library, ": ", opened ? "" : dlerror());
    return reinterpret_cast<const Place* (*)()>(dlsym(opened, "quire_test_place"))();
  }();
  return place;
}

inline const Context& here() { return elsewhere() ? elsewhere()->context : host(); }

template <class T>
struct AllocatorHere {
  using value_type = T;
  AllocatorHere() = default;
  template <class Other>
  AllocatorHere(const AllocatorHere<Other>&) {}

  T* allocate(size_t count) {
    return static_cast<T*>(elsewhere() ? elsewhere()->allocate(count * sizeof(T)) : ::operator new(count * sizeof(T)));
  }
  void deallocate(T* memory, size_t) {
    if (elsewhere())
      elsewhere()->release(memory);
    else
      ::operator delete(memory);
  }
  bool operator==(const AllocatorHere&) const { return true; }
};

/// An array in the memory of here().
template <class T>
using Array = std::vector<T, AllocatorHere<T>>;

/// A number in that memory, or none.
class OneHere {
 public:
  explicit OneHere(const float* number) : values_(number ? 1 : 0, number ? *number : 0) {}
  const float* get() const { return values_.empty() ? nullptr : values_.data(); }

 private:
  Array<float> values_;
};

}  // namespace quire::testing
