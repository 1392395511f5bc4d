#include "quire/device/dispatch.h"

#include <algorithm>

namespace quire {
namespace {

/// The names of all operations.
template <class... Problems>
struct Names {
  static constexpr size_t count(std::string_view op) { return (size_t{op == Problems::kOp} + ...); }
  static constexpr bool distinct() { return ((count(Problems::kOp) == 1) && ...); }
  static std::string joined() {
    std::string names;
    ((names += (names.empty() ? "" : ", ") + std::string(Problems::kOp)), ...);
    return names;
  }
};
static_assert(ForAllProblems<Names>::distinct(), "a name is forced for one operation alone");

}  // namespace

std::string_view forced_kernel(std::string_view setting, std::string_view op) {
  std::string_view found;
  for (std::string_view rest = setting; !rest.empty();) {
    const std::string_view entry = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(entry.size() + 1, rest.size()));
    const size_t colon = std::min(entry.find(':'), entry.size());
    const std::string_view entry_op = entry.substr(0, colon);
    const std::string_view name = entry.substr(std::min(colon + 1, entry.size()));
    if (ForAllProblems<Names>::count(entry_op) == 0 || name.empty())
      fail("QUIRE_KERNEL: '", entry, "' in '", setting, "' is not of the form OPERATION:NAME, with an operation of ",
           ForAllProblems<Names>::joined(), "; correct it or unset QUIRE_KERNEL");
    if (entry_op == op) found = name;
  }
  return found;
}

}  // namespace quire
