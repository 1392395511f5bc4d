// A result that may be quantized as it is computed, with memory of its own.
#pragma once

#include <optional>

#include "quantized.h"
#include "quire/spec/pointwise_problem.h"

namespace quire::testing {

/// What is asked of a destination.
struct Wanted {
  bool y = true;
  std::optional<QuantSpec> spec{};
  std::array<bool, 2> directions{true, true};
  const float* scale = nullptr;
  std::optional<float> amax{};
};

struct Produced {
  Guarded y;
  std::optional<Quantized> quantized;
};

/// Runs run(destination) into guarded memory.
template <class Run>
Produced produced(int64_t rows, int64_t cols, DType dtype, const Wanted& wanted, const Run& run) {
  Produced out{Guarded(rows * cols * size_of(dtype)), {}};
  const OneHere scale(wanted.scale), amax(wanted.amax ? &*wanted.amax : nullptr);
  Destination to{.y = {wanted.y ? out.y.data() : nullptr, dtype, rows, cols, cols},
                 .scale = scale.get(),
                 .amax = {.rowwise = amax.get()}};
  if (wanted.spec) {
    out.quantized.emplace(*wanted.spec, rows, cols, wanted.directions);
    to.spec = *wanted.spec;
    to.rowwise = out.quantized->view(Direction::rowwise);
    to.columnwise = out.quantized->view(Direction::columnwise);
  }
  run(to);
  EXPECT_TRUE(out.y.intact());
  EXPECT_TRUE(!out.quantized || out.quantized->intact());
  return out;
}

/// The bytes of `quantized` are those that the reference quantizes y to.
inline void expect_quantized(const Guarded& y, DType dtype, const Quantized& q, const Wanted& wanted) {
  const Matrix x{y.data(), dtype, q.rows, q.cols, q.cols};
  const Quantized expected =
      testing::quantized(reference_runner(), q.spec, x, {.directions = wanted.directions, .scale = wanted.scale});
  for (const Direction d : {Direction::rowwise, Direction::columnwise}) {
    ASSERT_EQ(difference(expected.side(d).amax, q.side(d).amax), "");
    ASSERT_EQ(difference(expected.side(d).scale, q.side(d).scale), "");
    ASSERT_EQ(difference(expected.side(d).data, q.side(d).data), "");
  }
}

/// Same values bit for bit, where any NaN equals any NaN.
inline std::string value_difference(const Guarded& expected, const Guarded& actual, DType dtype) {
  for (int64_t i = 0; i < expected.size() / size_of(dtype); ++i) {
    const float e = load_element(expected.data(), dtype, i), a = load_element(actual.data(), dtype, i);
    if (std::string d = float_difference(&e, &a, 1); !d.empty()) return text("element ", i, ": ", d);
  }
  return {};
}

/// Half the distance of neighbours of a dtype at magnitude 1, and at 0.
inline double unit(DType t) { return t == DType::f32 ? 0x1p-24 : t == DType::f16 ? 0x1p-11 : 0x1p-8; }
inline double tiny(DType t) { return t == DType::f16 ? 0x1p-25 : 0x1p-126; }

}  // namespace quire::testing
