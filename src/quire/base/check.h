// The only way the core raises. Every message names the operation, the rule, the values received and the remedy.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace quire {

/// What every function of the core throws when its arguments break a rule. State is unchanged when it is thrown.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Joins its parts with operator<<; g++ 12 has no <format>.
template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw Error(text(parts...));
}

template <class... Parts>
void check(bool condition, const Parts&... parts) {
  if (!condition) [[unlikely]]
    fail(parts...);
}

}  // namespace quire
