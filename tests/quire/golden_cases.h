// The golden vectors, as values of this library.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

#include "build_folders.h"
#include "golden/golden.hpp"
#include "quire/base/matrix.h"
#include "quire/base/shape.h"

namespace quire::testing {

inline const golden::Pack& golden_pack() {
  static const golden::Pack pack(kGoldenFolder);
  return pack;
}

/// The cases of a group; `count` is how many the archive must hold, so that a lost one is noticed.
inline std::vector<const golden::Case*> golden_group(std::string_view group, size_t count) {
  std::vector<const golden::Case*> out;
  for (const golden::Case& c : golden_pack().cases)
    if (c.group() == group) out.push_back(&c);
  EXPECT_EQ(out.size(), count) << "cases of group " << group;
  return out;
}

inline std::string field(const golden::Case& c, const std::string& key, const std::string& absent = "") {
  const auto found = c.spec.find(key);
  return found == c.spec.end() ? absent : found->second;
}

inline bool flag(const golden::Case& c, const std::string& key) { return field(c, key) == "1"; }

inline uint64_t unsigned_field(const golden::Case& c, const std::string& key) { return std::stoull(field(c, key)); }

/// A tensor of a case as a matrix. Inputs are stored as the bits of their own dtype.
inline Matrix matrix(const golden::Case& c, const std::string& tensor, std::string_view dtype) {
  const golden::Tensor& t = c.at(tensor);
  const int64_t cols = t.shape.back();
  return {t.ptr,
          dtype == "f32"   ? DType::f32
          : dtype == "f16" ? DType::f16
                           : DType::bf16,
          cols ? t.numel() / cols : 0, cols, cols};
}

inline Matrix input(const golden::Case& c) { return matrix(c, "x", field(c, "input")); }

/// Bytes of a golden tensor.
inline int64_t byte_count(const golden::Tensor& t) {
  const std::string& d = t.dtype;
  return t.numel() * (d == "uint8" ? 1 : d == "uint16" ? 2 : d == "uint64" || d == "float64" ? 8 : 4);
}

}  // namespace quire::testing
