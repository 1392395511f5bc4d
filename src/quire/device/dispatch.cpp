#include "quire/device/dispatch.h"

#include <algorithm>
#include <utility>

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

/// What comes before the first `end` of `rest`, or all of it; removes both from `rest`.
std::string_view until(char end, std::string_view& rest) {
  const std::string_view found = rest.substr(0, rest.find(end));
  rest.remove_prefix(std::min(found.size() + 1, rest.size()));
  return found;
}

}  // namespace

std::string_view forced_kernel(std::string_view setting, std::string_view op, std::string_view device) {
  std::string_view found;
  for (std::string_view rest = setting; !rest.empty();) {
    const std::string_view entry = until(',', rest);
    std::string_view name = entry, of_device, entry_op = until(':', name);
    if (name.find(':') != name.npos) of_device = std::exchange(entry_op, until(':', name));
    if (ForAllProblems<Names>::count(entry_op) == 0 || name.empty() ||
        (!of_device.empty() && !is_kind_of_device(of_device)))
      fail("QUIRE_KERNEL: '", entry, "' in '", setting,
           "' is not of the form OPERATION:NAME or DEVICE:OPERATION:NAME, with an operation of ",
           ForAllProblems<Names>::joined(), " and a device such as cpu or cuda; correct it or unset QUIRE_KERNEL");
    if (entry_op == op && (of_device.empty() || of_device == device)) found = name;
  }
  return found;
}

}  // namespace quire
