// Changes of PTX, one instruction each, that tests of its kernels have to notice.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace quire::testing {

struct Mutant {
  std::string kind;      ///< such as "barrier"
  std::string function;  ///< whose instruction it is
  std::size_t line;      ///< of the text, from 0
  std::string before, after;
  std::size_t other_line = 0;  ///< of a swap: this line becomes other_after
  std::string other_after = {};

  std::string text() const { return function + ": " + kind + ": " + before + " -> " + after; }
};

/// All of PTX as nvcc writes it. Kinds: "barrier" (deleted; also a wait for copies), "shuffle" (of another lane),
/// "index" (the address of a load or store of memory that threads share, one value further), "matrix" (the same of a
/// row of a matrix for tensor cores, 16 bytes further), "swap" (two loads of the same kind exchange their results),
/// "constant" (an operand of integer arithmetic, one more), "comparison" (at its border), "operation" (the opposite
/// one).
std::vector<Mutant> mutants_of(const std::string& ptx);

/// The PTX with one change.
std::string mutated(const std::string& ptx, const Mutant& mutant);

}  // namespace quire::testing
