// What nvcc accepts without a word in device code, and no device can run, found in the PTX that it writes.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace quire::emulator {

/// References to what only the host has, in PTX compiled with -G, a line each. A builtin function of the host's
/// compiler is a call through a null pointer there; a table of the host is null as the object of one of its functions.
/// Optimised PTX shows neither: nvcc deletes what depends on them.
std::vector<std::string> host_references(std::string_view unoptimised);

/// The kernels of optimised PTX that hold a trap: one that was written, or what is left of a read from null.
std::vector<std::string> traps(std::string_view optimised);

/// Bytes of local memory that each kernel of optimised PTX needs for arrays that registers cannot hold; 0 is left out.
std::map<std::string, std::size_t> local_memory(std::string_view optimised);

/// What ptxas -v says of a kernel of a chip: bytes of its stack, and of registers that are kept there.
struct Assembled {
  std::string kernel, chip;
  std::size_t stack = 0, spilled = 0;

  bool operator==(const Assembled&) const = default;
};
std::vector<Assembled> assembled(std::string_view ptxas);

}  // namespace quire::emulator
