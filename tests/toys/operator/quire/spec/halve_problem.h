// A problem of a toy: its rules, and what it is called.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "quire/base/check.h"

namespace quire {

/// y[i] = x[i] / 2.
struct HalveProblem {
  static constexpr std::string_view kOp = "halve";
  const float* x = nullptr;
  float* y = nullptr;
  int64_t count = 0;
};

inline std::string to_string(const HalveProblem& p) { return text("halve of ", p.count, " numbers"); }

inline void check_problem(const HalveProblem& p) {
  check(p.count == 0 || (p.x && p.y), "halve: x or y of ", p.count, " numbers is a null pointer; give its memory");
}

}  // namespace quire
