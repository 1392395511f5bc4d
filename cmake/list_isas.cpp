// Prints the instruction sets that this machine can run, for CMake to run tests with each of them.
#include <iostream>

#include "quire/cpu/isa.h"

int main() {
  for (const std::string_view name : quire::cpu::supported()) std::cout << name << ';';
}
