// The gate: nvcc is silent about some errors in device code; they are found in its PTX, planted ones too.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>

#include "build_folders.h"
#include "cuda/emulator/gate.h"
#include "cuda/ptx_files.h"

namespace quire::testing {
namespace {

/// Bytes of local memory that kernels may have. The 16 values of a block and the errors of the 16 lines of a tile, in
/// loops that are too long to be unrolled; a kernel of a known spec has all in registers.
const std::map<std::string, size_t> kAllowed{{"quantize_any", 128}};

TEST(Gate, KernelsReferToNothingOfTheHost) {
  int modules = 0;
  for (const auto& file : std::filesystem::directory_iterator(kPtxFolder)) {
    const std::string name = file.path().filename();
    const std::string module = name.substr(0, name.find('.'));
    // The others are about the emulator and the gate.
    const std::set<std::string> others{"violations", "faults", "features", "tensor"};
    if (!name.ends_with(".ptx") || name.ends_with(".debug.ptx") || others.contains(module)) continue;
    SCOPED_TRACE(name);
    const std::string optimised = ptx_of(name);
    EXPECT_EQ(emulator::host_references(ptx_of(module + ".debug.ptx")), std::vector<std::string>{});
    EXPECT_EQ(emulator::traps(optimised), std::vector<std::string>{});
    for (const auto& [kernel, bytes] : emulator::local_memory(optimised))
      EXPECT_TRUE(kAllowed.contains(kernel) && bytes <= kAllowed.at(kernel)) << kernel << " has " << bytes;
    ++modules;
  }
  EXPECT_GE(modules, 3);
}

/// The build fails where ptxas spills or warns (cmake/nvcc.sh). Local memory that it gives to arrays is looked at here.
TEST(Gate, PtxasGivesKernelsOfEachChipNoLocalMemory) {
  int kernels = 0;
  for (const auto& file : std::filesystem::directory_iterator(kFatbinFolder)) {
    if (file.path().extension() != ".ptxas") continue;
    SCOPED_TRACE(file.path().filename());
    std::ifstream stream(file.path());
    const std::string text{std::istreambuf_iterator<char>(stream), {}};
    for (const emulator::Assembled& one : emulator::assembled(text)) {
      EXPECT_TRUE(one.stack == 0 || (kAllowed.contains(one.kernel) && one.stack <= kAllowed.at(one.kernel)))
          << one.kernel << " for " << one.chip << " has " << one.stack << " bytes";
      EXPECT_EQ(one.spilled, 0u) << one.kernel << " for " << one.chip;
      ++kernels;
    }
  }
  EXPECT_GE(kernels, 100);
}

TEST(Gate, ReadsWhatPtxasSaysOfEachKernel) {
  const std::string text =
      "ptxas info    : 0 bytes gmem\nptxas info    : Compiling entry function 'plain' for 'sm_80'\n"
      "ptxas info    : Function properties for plain\n    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill "
      "loads\nptxas info    : Used 8 registers\nptxas info    : Compiling entry function 'spills' for 'sm_90'\n"
      "ptxas info    : Function properties for spills\n    136 bytes stack frame, 232 bytes spill stores, 288 bytes "
      "spill loads\n";
  const std::vector<emulator::Assembled> expected{{"plain", "sm_80", 0, 0}, {"spills", "sm_90", 136, 520}};
  EXPECT_EQ(emulator::assembled(text), expected);
}

TEST(Gate, EachPlantedViolationIsFoundInItsFunction) {
  const std::vector<std::string> found = emulator::host_references(ptx_of("violations.debug.ptx"));
  const auto names = [&](const std::string& function, const std::string& what) {
    return std::any_of(found.begin(), found.end(), [&](const std::string& finding) {
      return finding.find(function) != std::string::npos && finding.find(what) != std::string::npos;
    });
  };
  EXPECT_EQ(found.size(), 2u);
  EXPECT_TRUE(names("checked_product(long, long)", "calls a function that only the host has"));
  EXPECT_TRUE(names("mantissa_bits(int)", "reads a table of the host"));
  const std::string optimised = ptx_of("violations.ptx");
  EXPECT_EQ(emulator::traps(optimised), (std::vector<std::string>{"reads_an_array_of_the_host", "traps"}));
  EXPECT_EQ(emulator::local_memory(optimised), (std::map<std::string, size_t>{{"indexes_a_local_array", 64}}));
}

}  // namespace
}  // namespace quire::testing
