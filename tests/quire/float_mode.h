// The floating-point mode of the calling thread, with flush-to-zero as a caller of quire may have set it.
#pragma once

#include <cstdint>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace quire::testing {

#if defined(__SSE2__)
constexpr uint64_t kFlush = 0x8040;  // flush-to-zero and denormals-are-zero

inline uint64_t float_mode() { return _mm_getcsr(); }
inline void set_float_mode(uint64_t mode) { _mm_setcsr(static_cast<unsigned>(mode)); }
#elif defined(__aarch64__)
constexpr uint64_t kFlush = uint64_t{1} << 24;  // FPCR.FZ

inline uint64_t float_mode() {
  uint64_t mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode)::"memory");
  return mode;
}
inline void set_float_mode(uint64_t mode) { asm volatile("msr fpcr, %0" ::"r"(mode) : "memory"); }
#else
#error "say how this machine sets flush-to-zero"
#endif

}  // namespace quire::testing
