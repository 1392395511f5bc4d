// Kernels of a PTX file over arrays in memory of the emulator.
#pragma once

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "cuda/ptx_files.h"

namespace quire::testing {

/// A copy of values that kernels can reach.
template <class T>
T* device_array(auto& memory, const std::vector<T>& values) {
  auto* to = reinterpret_cast<T*>(memory.allocate(values.size() * sizeof(T)));
  std::copy(values.begin(), values.end(), to);
  return to;
}

inline const emulator::Program& kernel_of(const std::string& file, const std::string& name) {
  static std::map<std::string, std::map<std::string, emulator::Program>> files;
  const auto [found, is_new] = files.try_emplace(file);
  if (is_new) found->second = emulator::parse(ptx_of(file));
  return found->second.at(name);
}

/// Runs a kernel over its arguments, each laid out as C++ does.
template <class... T>
uint64_t launch(const emulator::Program& kernel, const emulator::Launch& how, emulator::Memory& memory,
                T... arguments) {
  std::vector<std::byte> bytes(kernel.parameter_bytes());
  std::size_t n = 0;
  const auto put = [&](const auto& value) {
    const emulator::Parameter& p = kernel.parameters().at(n++);
    ASSERT_EQ(p.bytes, sizeof value);
    std::memcpy(bytes.data() + p.offset, &value, sizeof value);
  };
  (put(arguments), ...);
  EXPECT_EQ(n, kernel.parameters().size());
  return emulator::run(kernel, how, bytes.data(), bytes.size(), memory);
}

}  // namespace quire::testing
