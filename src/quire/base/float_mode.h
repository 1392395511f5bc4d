// The floating-point mode in which kernels compute and texts are read and written (numerics.md 0.7).
#pragma once

#if defined(__SSE2__)
#include <xmmintrin.h>
#elif defined(__aarch64__)
#include <cstdint>
#else
#include <cfenv>
#endif

namespace quire {

/// For its lifetime: round to nearest even, subnormals kept, exceptions masked. A thread may arrive with
/// flush-to-zero set (torch.set_flush_denormal, some BLAS pools), which would change bits.
class FloatMode {
 public:
#if defined(__SSE2__)
  FloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(kDefaultMxcsr); }
  ~FloatMode() { _mm_setcsr(saved_); }
#elif defined(__aarch64__)
  FloatMode() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_)::"memory");
    set(0);
  }
  ~FloatMode() { set(saved_); }
#else
  FloatMode() { std::feholdexcept(&saved_), std::fesetenv(FE_DFL_ENV); }
  ~FloatMode() { std::fesetenv(&saved_); }
#endif
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
#if defined(__SSE2__)
  static constexpr unsigned kDefaultMxcsr = 0x1F80;
  unsigned saved_;
#elif defined(__aarch64__)
  static void set(uint64_t mode) { asm volatile("msr fpcr, %0" ::"r"(mode) : "memory"); }
  uint64_t saved_;
#else
  std::fenv_t saved_;
#endif
};

}  // namespace quire
