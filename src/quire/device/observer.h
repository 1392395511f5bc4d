// The one stream of events of the core: every problem that has run. Explanations and statistics listen to it.
#pragma once

#include <variant>

#include "quire/device/device.h"

namespace quire {

template <class... Problems>
using OneOfPointers = std::variant<const Problems*...>;
/// A problem of any kind; never null.
using AnyProblem = ForAllProblems<OneOfPointers>;

class Observer {
 public:
  virtual ~Observer() = default;

  /// Whether it reads what problems have read and written: results that nobody else wants are then made too.
  virtual bool reads_values() const = 0;
  /// Called by the thread that asked for the problem once its kernel has returned, while the memory is as the kernel
  /// left it (on other devices than the host: while the kernel may still run).
  virtual void ran(const AnyProblem& problem, const Context& context) = 0;
};

}  // namespace quire
