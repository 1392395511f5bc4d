#include "quire/base/env.h"

#include <cstdlib>

#include "quire/base/lazy.h"

namespace quire::env {
namespace {

std::string read(const char* variable) {
  const char* value = std::getenv(variable);
  return value ? value : "";
}

}  // namespace

const std::string& isa() {
  static constinit Lazy<const std::string> value;
  return value.get([] { return read("QUIRE_ISA"); });
}

const std::string& kernel() {
  static constinit Lazy<const std::string> value;
  return value.get([] { return read("QUIRE_KERNEL"); });
}

const std::string& self_check() {
  static constinit Lazy<const std::string> value;
  return value.get([] { return read("QUIRE_SELF_CHECK"); });
}

}  // namespace quire::env
