// Element types of plain (not quantized) memory.
#pragma once

#include <cstdint>
#include <string_view>

namespace quire {

enum class DType : uint8_t { u8, f32, f16, bf16 };

constexpr int64_t size_of(DType t) { return t == DType::u8 ? 1 : t == DType::f32 ? 4 : 2; }

constexpr std::string_view name(DType t) {
  constexpr std::string_view names[] = {"uint8", "float32", "float16", "bfloat16"};
  return names[static_cast<int>(t)];
}

/// Largest finite value of a floating type (numerics.md 0.1): the scale that replaces an infinite one (3.1).
constexpr float largest_finite(DType t) {
  return t == DType::f16 ? 65504.0f : t == DType::bf16 ? 0x1.FEp127f : 0x1.FFFFFEp127f;
}

}  // namespace quire
