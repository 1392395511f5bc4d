// Prints the instruction sets that this machine can run, for CMake to run tests with each of them. With the argument
// `kernels`, of those that differ in products alone the first.
#include <iostream>
#include <set>

#include "quire/cpu/isa.h"

int main(int count, char**) {
  std::set<const void*> seen;
  for (const quire::cpu::Isa& isa : quire::cpu::all())
    if (isa.supported() && (seen.insert(isa.kernels).second || count == 1)) std::cout << isa.name << ';';
}
