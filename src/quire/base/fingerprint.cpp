#include "quire/base/fingerprint.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "quire/base/parallel.h"

namespace quire {
namespace {

constexpr uint64_t kPlace = 0x9E3779B97F4A7C15u, kMix = 0xD6E8FEB86659FD93u;  // odd, bits well spread

/// A bijection of `word` for every place, so that one changed word always changes the sum.
uint64_t mixed(uint64_t word, uint64_t place) {
  uint64_t v = word + place * kPlace;
  v = (v ^ (v >> 32)) * kMix;
  return v ^ (v >> 32);
}

uint64_t of_row(const char* row, size_t bytes, uint64_t place) {
  uint64_t sum = 0, word = 0;
  size_t i = 0;
  for (; i + 8 <= bytes; i += 8) {
    std::memcpy(&word, row + i, 8);
    sum += mixed(word, place++);
  }
  if (i < bytes) {
    word = 0;
    std::memcpy(&word, row + i, bytes - i);
    sum += mixed(word, place);
  }
  return sum;
}

}  // namespace

uint64_t fingerprint(const Matrix& x) {
  const size_t element = static_cast<size_t>(size_of(x.dtype)), bytes = element * static_cast<size_t>(x.cols);
  const uint64_t words = (bytes + 7) / 8;
  std::atomic<uint64_t> sum{0};
  // Sums commute, so the cut into rows does not show.
  parallel_for(x.rows, std::max<int64_t>(1, (int64_t{1} << 16) / std::max<int64_t>(1, static_cast<int64_t>(bytes))),
               [&](int64_t begin, int64_t end) {
                 uint64_t part = 0;
                 for (int64_t i = begin; i < end; ++i)
                   part += of_row(static_cast<const char*>(x.data) + static_cast<size_t>(i * x.row_stride) * element,
                                  bytes, static_cast<uint64_t>(i) * words);
                 sum += part;
               });
  return mixed(sum, static_cast<uint64_t>(x.rows) * 31 + static_cast<uint64_t>(x.cols));
}

}  // namespace quire
