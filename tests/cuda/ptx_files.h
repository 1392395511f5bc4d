// The PTX that the build has made of the files of this folder.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>

#include "build_folders.h"
#include "cuda/emulator/emulator.h"

namespace quire::testing {

/// `name` such as "kernels.ptx", or "kernels.debug.ptx" for what -G makes. QUIRE_PTX_INSTEAD=NAME=PATH: another file.
inline std::string ptx_of(const std::string& name) {
  std::string path = std::string(kPtxFolder) + "/" + name;
  if (const char* instead = std::getenv("QUIRE_PTX_INSTEAD"); instead && std::string(instead).starts_with(name + "="))
    path = instead + name.size() + 1;
  std::ifstream file(path);
  EXPECT_TRUE(file) << "no file " << path;
  return {std::istreambuf_iterator<char>(file), {}};
}

inline bool has_ptx(const std::string& name) { return std::filesystem::exists(std::string(kPtxFolder) + "/" + name); }

/// Runs a kernel of kernels.cu over a struct of its parameters, on as many threads as have work, but not more than 80:
/// then some have a second turn.
template <class Job>
uint64_t run_kernel(const std::string& kernel, const Job& job, int64_t work, emulator::Memory& memory) {
  static const std::map<std::string, emulator::Program> kernels = emulator::parse(ptx_of("kernels.ptx"));
  const unsigned threads = static_cast<unsigned>(work < 1 ? 1 : work > 80 ? 80 : work);
  const emulator::Launch launch{.grid = {(threads + 15) / 16}, .block = {16}};
  return emulator::run(kernels.at(kernel), launch, &job, sizeof job, memory);
}

}  // namespace quire::testing
