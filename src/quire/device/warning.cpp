#include "quire/device/warning.h"

#include <atomic>
#include <cstdio>

namespace quire {
namespace {

std::atomic<Warn*> in_use{nullptr};

}  // namespace

Warn* set_warn(Warn* warn) { return in_use.exchange(warn); }

void warn(const std::string& text) {
  if (Warn* const found = in_use)
    found(text);
  else
    std::fputs((text + "\n").c_str(), stderr);
}

}  // namespace quire
