#include "quire/base/env.h"

#include <cstdlib>

namespace quire::env {
namespace {

std::string read(const char* variable) {
  const char* value = std::getenv(variable);
  return value ? value : "";
}

}  // namespace

const std::string& isa() {
  static const std::string value = read("QUIRE_ISA");
  return value;
}

const std::string& kernel() {
  static const std::string value = read("QUIRE_KERNEL");
  return value;
}

}  // namespace quire::env
