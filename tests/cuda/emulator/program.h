// A module of PTX, ready to be run: a function is a list of instructions over numbered registers.
#pragma once

#include <array>

#include "cuda/emulator/emulator.h"

namespace quire::emulator {

class Thread;
struct Instruction;

/// Runs an instruction. Returns the one to run next; null where the thread has to wait or has ended.
using Operation = const Instruction* (*)(Thread&, const Instruction&);

/// Registers, immediates and addresses of variables are all registers of the thread, by number.
struct Instruction {
  Operation run = nullptr;
  std::array<int, 10> at{};  ///< results, then operands; of loads and stores the values, then the address
  int values = 0;            ///< of a load or store; of others the number of operands
  int target = 0;            ///< of a branch how many instructions on; of others an index into a list of the function
  int64_t offset = 0;        ///< added to the address
};

/// A register that has a value from the start, such as %tid.x.
struct Special {
  int slot;
  uint64_t (*value)(const Thread&);
};

struct Call {
  /// Of bytes between the parameters of two functions.
  struct Copy {
    std::size_t from, to, bytes;
  };
  const Function* callee = nullptr;
  std::vector<Copy> arguments, results;
};

/// A variable in the memory of parameters of a function.
struct Area {
  std::size_t offset, bytes;
};

struct Function {
  std::string name;
  std::vector<Instruction> code;
  std::vector<std::string> texts;   ///< of each instruction
  std::vector<uint64_t> registers;  ///< at the start: immediates, and poison elsewhere
  std::vector<Special> specials;
  std::vector<int> operands;             ///< of instructions that have more than ten
  std::vector<std::vector<int>> tables;  ///< of branches by index, each entry like Instruction::target
  std::vector<Call> calls;
  std::vector<std::string> refusals;  ///< why an instruction is refused
  std::vector<Parameter> parameters, results;
  std::size_t parameter_bytes = 0;  ///< of what the caller gives
  std::size_t area_bytes = 0;       ///< with results, and what it gives to functions that it calls
  std::size_t local_bytes = 0;      ///< of each thread
  std::size_t shared_bytes = 0;     ///< of each block, with the variables of the module
  std::size_t most_threads = 1024;  ///< of a block
};

struct Module {
  std::map<std::string, Function> functions;
  std::vector<std::byte> constants;  ///< initialised variables
};

/// What an operation such as "add.rn.f32" does; null if it is unknown. Without what does not change the result of a
/// single thread, such as the hints of a load.
Operation operation(const std::string& name);

/// Where a thread reads a special register such as "%tid.x"; null if it is unknown.
uint64_t (*special_register(const std::string& name))(const Thread&);

/// Space for shared memory that the system takes: address 0 is no variable.
constexpr std::size_t kSharedBegin = 1024;

// Generic addresses outside of global memory.
constexpr uint64_t kSpaceMask = uint64_t{15} << 60;
constexpr uint64_t kShared = uint64_t{1} << 60, kLocal = uint64_t{2} << 60, kParam = uint64_t{3} << 60,
                   kConstants = uint64_t{4} << 60;

}  // namespace quire::emulator
