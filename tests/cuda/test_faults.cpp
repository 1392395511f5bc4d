// Kernels of faults.cu, each with an error that a GPU does not tell: the emulator does, in any order of threads.
#include <gtest/gtest.h>

#include <numeric>

#include "cuda/device_arrays.h"

namespace quire::testing {
namespace {

struct Fault {
  const char* kernel;
  const char* text;  ///< of the error
  unsigned threads = 128;
};

/// What running a kernel of faults.cu over 128 numbers says; "" where it runs to its end.
std::string error_of(const Fault& fault, uint64_t seed, emulator::Memory& memory, const int* x, int* out) {
  try {
    launch(kernel_of("faults.ptx", fault.kernel), {{1}, {fault.threads}, 4 * fault.threads, seed, 10'000'000}, memory,
           x, out);
  } catch (const emulator::Error& e) {
    return e.what();
  }
  return "";
}

constexpr Fault kFaults[] = {
    {"has_no_barrier", "without a barrier in between"},
    {"overwrites_what_others_read", "without a barrier in between"},
    {"has_a_barrier_of_too_few", "without a barrier in between"},
    {"overwrites_after_a_barrier_of_the_warp", "without a barrier in between"},
    {"writes_bytes_that_others_write", "without a barrier in between"},
    {"shuffles_instead_of_waiting", "without a barrier in between", 32},
    {"reads_what_nobody_wrote", "which nobody has written"},
    {"adds_without_atomics", "without a barrier in between"},
    {"reads_beyond_shared_memory", "outside of the 512 bytes of shared memory"},
    {"reads_shared_memory_unaligned", "not aligned"},
    {"waits_for_threads_that_never_come", "deadlock"},
    {"waits_in_divergent_code", "divergent code"},
    {"shuffles_with_a_lane_elsewhere", "lanes of one warp at different words"},
    {"shuffles_with_a_mask_without_itself", "a mask of lanes without the lane"},
    {"spins_for_ever", "does not end"},
    {"asks_for_the_time", "%clock64"},
    {"is_not_exact", "not exact"},
};

TEST(Faults, EachIsFoundInEachOrder) {
  std::vector<int> x(128);
  std::iota(x.begin(), x.end(), 0);
  for (const Fault& fault : kFaults)
    for (uint64_t seed = 0; seed < 6; ++seed) {
      emulator::HostMemory memory;
      const std::string error = error_of(fault, seed, memory, device_array(memory, x), device_array(memory, x));
      EXPECT_NE(error.find(fault.text), std::string::npos) << fault.kernel << " with seed " << seed << ": " << error;
      EXPECT_EQ(error.find("deadlock") == std::string::npos,
                error.find("in " + std::string(fault.kernel) + ", thread") != std::string::npos)
          << error;
    }
}

TEST(Faults, TheKernelWithABarrierHasNone) {
  std::vector<int> x(128);
  std::iota(x.begin(), x.end(), 0);
  for (uint64_t seed = 0; seed < 6; ++seed) {
    emulator::HostMemory memory;
    int* out = device_array(memory, x);
    EXPECT_EQ(error_of({"has_a_barrier", ""}, seed, memory, device_array(memory, x), out), "");
    for (int i = 0; i < 128; ++i) EXPECT_EQ(out[i], 127 - i);
  }
}

/// Memory at other addresses than the host's, a part of which kernels may only read.
class MovedMemory final : public emulator::Memory {
 public:
  static constexpr uint64_t kBegin = 0x7'0000'0000;
  std::byte* translate(const std::byte* address, std::size_t size, bool write) override {
    const uint64_t at = reinterpret_cast<uint64_t>(address) - kBegin;
    if (at >= sizeof bytes || size > sizeof bytes - at || (write && at < 512)) return nullptr;
    return reinterpret_cast<std::byte*>(bytes) + at;
  }
  int bytes[256] = {};
};

TEST(Faults, MemoryMayHaveAddressesOfItsOwnAndRefuseWrites) {
  MovedMemory memory;
  std::iota(memory.bytes, memory.bytes + 128, 0);
  const auto* x = reinterpret_cast<const int*>(MovedMemory::kBegin);
  auto* out = reinterpret_cast<int*>(MovedMemory::kBegin + 512);
  EXPECT_EQ(error_of({"has_a_barrier", ""}, 0, memory, x, out), "");
  for (int i = 0; i < 128; ++i) EXPECT_EQ(memory.bytes[128 + i], 127 - i);
  const std::string error = error_of({"writes_a_constant_pointer", ""}, 0, memory, x, out);
  EXPECT_NE(error.find("outside of the device's memory"), std::string::npos) << error;
}

TEST(Faults, ALaunchThatADeviceWouldRefuseIsRefused) {
  const emulator::Program& kernel = kernel_of("faults.ptx", "has_a_barrier");
  emulator::HostMemory memory;
  int* x = nullptr;
  const emulator::Launch launches[] = {{{1}, {1025}},      {{1}, {0}},        {{0}, {32}},
                                       {{1, 65536}, {32}}, {{1}, {1, 1, 65}}, {{1}, {32}, 228 * 1024}};
  for (const emulator::Launch& l : launches) EXPECT_THROW(launch(kernel, l, memory, x, x), emulator::Error);
  EXPECT_THROW(emulator::run(kernel, {{1}, {32}}, &x, sizeof x, memory), emulator::Error);
}

TEST(Faults, WhatAKernelHasThatIsRefusedIsKnownBeforeItRuns) {
  EXPECT_EQ(kernel_of("faults.ptx", "has_no_barrier").refused(), std::vector<std::string>{});
  const std::vector<std::string> refused = kernel_of("faults.ptx", "is_not_exact").refused();
  ASSERT_EQ(refused.size(), 1u);
  EXPECT_NE(refused[0].find("ex2.approx"), std::string::npos) << refused[0];
}

}  // namespace
}  // namespace quire::testing
