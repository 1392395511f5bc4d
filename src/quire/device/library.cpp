#include "quire/device/library.h"

#include <atomic>

namespace quire {
namespace {

std::atomic<Matmul*> in_use{nullptr};

}  // namespace

Matmul* set_matmul(Matmul* matmul) { return in_use.exchange(matmul); }
Matmul* matmul_in_use() { return in_use; }

}  // namespace quire
