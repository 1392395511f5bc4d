// What the core has to say to whoever uses it, where nothing is wrong enough to raise an error.
#pragma once

#include <string>

namespace quire {

using Warn = void(const std::string&);

/// Replaces what happens with warnings, for the whole process, and returns what was before; null: they are lines of
/// stderr.
Warn* set_warn(Warn* warn);
void warn(const std::string& text);

}  // namespace quire
