// The fingerprint of a matrix (FingerprintProblem): a sum over the words of 8 bytes of its rows, so that no order
// shows.
#pragma once

#include <cstdint>

namespace quire {

/// A bijection of `word` for every place, so that one changed word always changes the sum.
constexpr uint64_t mixed(uint64_t word, uint64_t place) {
  constexpr uint64_t of_place = 0x9E3779B97F4A7C15u, of_word = 0xD6E8FEB86659FD93u;  // odd, bits well spread
  uint64_t v = word + place * of_place;
  v = (v ^ (v >> 32)) * of_word;
  return v ^ (v >> 32);
}

/// The fingerprint, from the sum of mixed words of all rows. Each row has ceil(bytes / 8) words, the last one filled up
/// with zeros; the place of a word is its number among those of all rows.
constexpr uint64_t fingerprint_of(uint64_t sum, int64_t rows, int64_t cols) {
  return mixed(sum, static_cast<uint64_t>(rows) * 31 + static_cast<uint64_t>(cols));
}

}  // namespace quire
