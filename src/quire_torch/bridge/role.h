// The role of what is quantized, for observers (observe.h), where the operator that quantizes does not know it.
#pragma once

#include <utility>

namespace quire_torch {

/// While one lives, what this thread quantizes by an operator without a role has this one: "x", "w" or "dy". A product
/// that reads the codes cannot tell if the codes were sent to other ranks first: it reads another copy of them.
class NamedRole {
 public:
  explicit NamedRole(const char* role) : before_(std::exchange(current, role)) {}
  ~NamedRole() { current = before_; }
  NamedRole(const NamedRole&) = delete;
  NamedRole& operator=(const NamedRole&) = delete;

  /// The role of a problem that says `own`.
  static const char* of(const char* own) { return *own == '\0' ? current : own; }

 private:
  inline static thread_local const char* current = "";
  const char* before_;
};

}  // namespace quire_torch
