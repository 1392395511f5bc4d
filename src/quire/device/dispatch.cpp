#include "quire/device/dispatch.h"

#include <algorithm>

namespace quire {
namespace {

/// The names of all operations, each once.
template <class... Problems>
struct Names {
  static bool contain(std::string_view op) { return ((op == Problems::kOp) || ...); }
  static std::string joined() {
    std::string names;
    std::string_view last;
    const auto add = [&](std::string_view op) {
      if (op != last) names += (names.empty() ? "" : ", ") + std::string(op);
      last = op;
    };
    (add(Problems::kOp), ...);
    return names;
  }
};

}  // namespace

std::string_view forced_kernel(std::string_view setting, std::string_view op) {
  std::string_view found;
  for (std::string_view rest = setting; !rest.empty();) {
    const std::string_view entry = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(entry.size() + 1, rest.size()));
    const size_t colon = std::min(entry.find(':'), entry.size());
    const std::string_view entry_op = entry.substr(0, colon);
    const std::string_view name = entry.substr(std::min(colon + 1, entry.size()));
    if (!ForAllProblems<Names>::contain(entry_op) || name.empty())
      fail("QUIRE_KERNEL: '", entry, "' in '", setting, "' is not of the form OPERATION:NAME, with an operation of ",
           ForAllProblems<Names>::joined(), "; correct it or unset QUIRE_KERNEL");
    if (entry_op == op) found = name;
  }
  return found;
}

}  // namespace quire
