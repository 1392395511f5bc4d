#include "quire/runner/runner.h"

#include "quire/base/check.h"

namespace quire {

void Runner::take(const Runner& /*other*/, const Storage& /*storage*/) {
  fail("runner: '", info_.description, "' has no weights that quire can write; change them where it has them");
}

}  // namespace quire
