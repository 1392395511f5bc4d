// PTX as nvcc writes it, ready to be run: a kernel is a list of instructions over numbered registers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace quire::emulator {

/// What a device would not have done, or what the emulator does not know: named with the instruction.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Thread;

/// One instruction. Registers, immediates and addresses of parameters are all registers of the thread, by number.
struct Instruction {
  void (*run)(Thread&, const Instruction&) = nullptr;
  std::array<int, 6> at{};  ///< results, then operands; of loads and stores the values, then the address
  int values = 0;           ///< of a load or store
  int64_t offset = 0;       ///< added to the address
  int guard = -1;           ///< the predicate under which it runs, or none
  bool guard_value = true;  ///< what the predicate must be
  std::size_t target = 0;   ///< of a branch
  std::string text;
};

struct Parameter {
  int slot;            ///< the register that holds its address
  std::size_t offset;  ///< in the bytes of all parameters, as PTX and C++ lay them out
};

struct Program {
  std::vector<Instruction> code;
  std::vector<uint64_t> registers;   ///< at the start of a thread: immediates, and poison elsewhere
  std::map<std::string, int> slots;  ///< by name
  std::vector<Parameter> parameters;
  std::size_t parameter_bytes = 0;
  std::size_t local_bytes = 0;  ///< memory of each thread
  int local_slot = -1;
};

/// The kernels of a PTX file by name. Throws Error for an operation that it does not know, such as trap or call.
std::map<std::string, Program> parse(std::string_view ptx);

/// What an operation such as "add.rn.f32" does; null if it is unknown.
using Operation = void (*)(Thread&, const Instruction&);
Operation operation(const std::string& name);

}  // namespace quire::emulator
