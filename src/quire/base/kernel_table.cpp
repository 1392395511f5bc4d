#include "quire/base/kernel_table.h"

#include <algorithm>
#include <array>

namespace quire {
namespace {

constexpr std::array<std::string_view, 4> kOps{"quantize", "gemm", "norm", "activation"};

}  // namespace

std::string_view forced_kernel(std::string_view setting, std::string_view op) {
  std::string_view found;
  for (std::string_view rest = setting; !rest.empty();) {
    const std::string_view entry = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(entry.size() + 1, rest.size()));
    const size_t colon = std::min(entry.find(':'), entry.size());
    const std::string_view entry_op = entry.substr(0, colon);
    const std::string_view name = entry.substr(std::min(colon + 1, entry.size()));
    check(std::find(kOps.begin(), kOps.end(), entry_op) != kOps.end() && !name.empty(), "QUIRE_KERNEL: '", entry,
          "' in '", setting,
          "' is not of the form quantize:NAME, gemm:NAME, norm:NAME or activation:NAME; correct it or unset "
          "QUIRE_KERNEL");
    if (entry_op == op) found = name;
  }
  return found;
}

}  // namespace quire
