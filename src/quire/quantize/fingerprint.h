// Whether memory still holds what it held: for codes that are kept while the tensor they came from may change.
#pragma once

#include <cstdint>

#include "quire/base/matrix.h"

namespace quire {

/// 64 bits of all elements of x and their places. A changed matrix keeps its fingerprint with a chance of about 2^-64;
/// it is no defence against somebody who seeks one that does. Reads x once; independent of instruction sets, threads
/// and strides.
uint64_t fingerprint(const Matrix& x);

}  // namespace quire
