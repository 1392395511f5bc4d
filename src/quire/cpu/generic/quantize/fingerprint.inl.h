// Fingerprints of matrices (quantize/fingerprint.h). Plain loops, which a compiler turns into the region's vectors.
#pragma once

#include "quire/cpu/generic/elements/lines.inl.h"

/// The sum of mixed words of `bytes` bytes, the last filled up with zeros.
inline uint64_t sum_of_words(const char* from, int64_t bytes, uint64_t place) {
  uint64_t sum = 0;
  const int64_t words = bytes / 8;
  for (int64_t i = 0; i < words; ++i) {
    uint64_t word;
    std::memcpy(&word, from + i * 8, 8);
    sum += mixed(word, place + static_cast<uint64_t>(i));
  }
  if (const int64_t rest = bytes % 8) {
    uint64_t word = 0;
    std::memcpy(&word, from + words * 8, static_cast<size_t>(rest));
    sum += mixed(word, place + static_cast<uint64_t>(words));
  }
  return sum;
}

uint64_t fingerprint(const Matrix& x) {
  // The other size may be any, also one that no memory has.
  if (x.rows == 0 || x.cols == 0) return fingerprint_of(0, x.rows, x.cols);
  const int64_t bytes = x.cols * size_of(x.dtype), words = ceil_div(bytes, 8);
  const bool one_line = x.row_stride == x.cols && bytes % 8 == 0;
  std::atomic<uint64_t> sum{0};
  // Sums commute, so the cut into rows does not show.
  parallel_for(x.rows, std::max<int64_t>(1, (int64_t{1} << 16) / bytes), [&](int64_t begin, int64_t end) {
    const int64_t count = one_line ? 1 : end - begin, length = one_line ? bytes * (end - begin) : bytes;
    uint64_t part = 0;
    for (int64_t i = begin; i < begin + count; ++i)
      part += sum_of_words(static_cast<const char*>(element_of(x, i, 0)), length, static_cast<uint64_t>(i * words));
    sum += part;
  });
  return fingerprint_of(sum, x.rows, x.cols);
}
