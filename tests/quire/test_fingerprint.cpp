// Fingerprints of matrices: every change shows, and nothing else does.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "quire/base/parallel.h"
#include "quire/cpu/isa.h"
#include "quire/operations/operations.h"

namespace quire {
namespace {

Matrix view(const std::vector<float>& values, int64_t rows, int64_t cols, int64_t stride) {
  return {values.data(), DType::f32, rows, cols, stride};
}

TEST(Fingerprint, ShowsEveryChangedBitAndEveryPlace) {
  std::vector<float> values(7 * 5, 1.0f);
  std::set<uint64_t> seen{fingerprint(view(values, 7, 5, 5))};
  for (float& v : values) {
    v = 1.0000001f;
    EXPECT_TRUE(seen.insert(fingerprint(view(values, 7, 5, 5))).second);
    v = 1.0f;
  }
  EXPECT_TRUE(seen.insert(fingerprint(view(values, 5, 7, 7))).second);  // the same memory in another shape
  EXPECT_TRUE(seen.insert(fingerprint(view(values, 6, 5, 5))).second);
  EXPECT_FALSE(seen.insert(fingerprint(view(values, 7, 5, 5))).second);
}

TEST(Fingerprint, DependsNeitherOnStridesNorOnThreads) {
  constexpr int64_t kRows = 3000, kCols = 33;
  std::vector<float> tight(kRows * kCols), loose(kRows * 40, 9.0f);
  for (int64_t i = 0; i < kRows; ++i)
    for (int64_t j = 0; j < kCols; ++j)
      loose[static_cast<size_t>(i * 40 + j)] = tight[static_cast<size_t>(i * kCols + j)] =
          static_cast<float>(i - 2 * j);
  const uint64_t expected = fingerprint(view(tight, kRows, kCols, kCols));
  EXPECT_EQ(fingerprint(view(loose, kRows, kCols, 40)), expected);
  const Executor before = set_executor([](int64_t count, int64_t, const std::function<void(int64_t, int64_t)>& body) {
    for (int64_t i = count; i > 0; --i) body(i - 1, i);
  });
  EXPECT_EQ(fingerprint(view(tight, kRows, kCols, kCols)), expected);
  set_executor(before);
}

/// The sum of all words, each mixed with its place, word by word.
uint64_t by_definition(const std::vector<uint16_t>& values, int64_t rows, int64_t cols) {
  const auto mixed = [](uint64_t word, uint64_t place) {
    const uint64_t v = word + place * 0x9E3779B97F4A7C15u, w = (v ^ (v >> 32)) * 0xD6E8FEB86659FD93u;
    return w ^ (w >> 32);
  };
  uint64_t sum = 0, place = 0;
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t first = 0; first < cols; first += 4, ++place) {
      uint64_t word = 0;
      for (int64_t j = first; j < std::min(first + 4, cols); ++j)
        word |= uint64_t{values[static_cast<size_t>(i * cols + j)]} << (16 * (j - first));
      sum += mixed(word, place);
    }
  return mixed(sum, static_cast<uint64_t>(rows * 31 + cols));
}

TEST(Fingerprint, IsTheSameOnEveryInstructionSet) {
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{3, 7}, {5, 64}, {40, 100}, {1, 4097}, {700, 260}}) {
    std::vector<uint16_t> values(static_cast<size_t>(rows * cols));
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<uint16_t>(i * i * 40503u >> 3);
    const Matrix x{values.data(), DType::bf16, rows, cols, cols};
    for (const cpu::Isa& isa : cpu::all())
      if (isa.supported()) {
        EXPECT_EQ(isa.kernels->fingerprint(x), by_definition(values, rows, cols)) << isa.name << " " << cols;
      }
  }
}

TEST(Fingerprint, TakesAnyDtypeAndNothing) {
  const std::vector<uint16_t> half{1, 2, 3};
  const Matrix x{half.data(), DType::bf16, 1, 3, 3}, y{half.data(), DType::bf16, 1, 2, 2};
  EXPECT_NE(fingerprint(x), fingerprint(y));
  EXPECT_EQ(fingerprint(Matrix{nullptr, DType::f32, 0, 5, 5}), fingerprint(Matrix{nullptr, DType::f32, 0, 5, 5}));
}

}  // namespace
}  // namespace quire
