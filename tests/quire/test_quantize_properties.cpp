// What must hold of formats and options that have no golden vectors: each is tied to one that has, or to the contract's
// own table.
#include <bit>

#include "inputs.h"
#include "quantized.h"
#include "quire/operations/operations.h"
#include "quire/spec/scale.h"
#include "quire/spec/scale_index.h"
#include "specs.h"

namespace quire::testing {
namespace {

constexpr Direction kRow = Direction::rowwise, kCol = Direction::columnwise;

class QuantizeProperties : public EveryRunner {
 protected:
  Quantized run(std::string_view spec, const Matrix& x, const QuantizeOptions& options = {}) const {
    return quantized(GetParam(), QuantSpec::parse(spec), x, options);
  }
};

/// Element (outer, l) of a direction's codes.
unsigned code(const Quantized& q, Direction d, int64_t o, int64_t l) {
  const Operand v = q.operand(d);
  return code_at(q.spec, q.side(d).data.as<uint8_t>(), data_index({q.spec, d, v.outer, v.contraction}, o, l));
}

/// Bits of the scale of (outer, l).
uint32_t scale_bits(const Quantized& q, Direction d, int64_t o, int64_t l) {
  const Operand v = q.operand(d);
  const int64_t length = block_length(q.spec, v.contraction), blocks = block_count(q.spec, v.contraction);
  const int64_t i = scale_index({q.spec, d, v.outer, blocks}, o, l / length);
  const QuantizedSide& side = q.side(d);
  return q.spec.row().scale == ScaleKind::f32 ? side.scale.as<uint32_t>()[i] : uint32_t{side.scale.as<uint8_t>()[i]};
}

TEST_P(QuantizeProperties, EachLineOfAPerRowTensorIsAPerTensorOneOfItsOwn) {
  const int64_t m = 21, k = 35;
  for (const std::string options : {"", ":e5m2", ":pow2", ":eps=0.5"})
    for (const Kind kind : {Kind::normal, Kind::special, Kind::wide, Kind::zeros}) {
      const Input input({m, k, 2}, DType::bf16, kind, 3);
      const Matrix x = input;
      const Quantized rows = run("fp8_row" + options, x);
      const auto* data = static_cast<const uint16_t*>(x.data);
      for (int64_t i = 0; i < m; ++i) {
        const Quantized one = run("fp8_tensor" + options, {data + i * x.row_stride, x.dtype, 1, k, k});
        ASSERT_EQ(scale_bits(rows, kRow, i, 0), scale_bits(one, kRow, 0, 0)) << "row " << i;
        for (int64_t j = 0; j < k; ++j) ASSERT_EQ(code(rows, kRow, i, j), code(one, kRow, 0, j));
      }
      for (int64_t j = 0; j < k; ++j) {
        const Quantized one = run("fp8_tensor" + options, {data + j, x.dtype, m, 1, x.row_stride});
        ASSERT_EQ(scale_bits(rows, kCol, j, 0), scale_bits(one, kCol, 0, 0)) << "column " << j;
        for (int64_t i = 0; i < m; ++i) ASSERT_EQ(code(rows, kCol, j, i), code(one, kCol, 0, i));
      }
    }
}

TEST_P(QuantizeProperties, AScaleThatOverflowsIsTheLargestValueOfTheInputsTypePerBlockAndOfFloat32Elsewhere) {
  const Array<uint16_t> bf16{f32_to_bf16(0x1p-130f)};
  const Array<float> f32{0x1p-130f};
  const auto stored = [&](std::string_view spec, DType dtype) {
    const Quantized q =
        run(spec, {dtype == DType::bf16 ? static_cast<const void*>(bf16.data()) : f32.data(), dtype, 1, 1, 1});
    return std::pair(q.side(kRow).scale.as<float>()[0], q.side(kCol).scale.as<float>()[0]);
  };
  const auto both = [](float x) { return std::pair(1.0f / x, 1.0f / x); };
  for (const std::string_view block : {"fp8_block", "fp8_block:128x128"}) {
    EXPECT_EQ(stored(block, DType::bf16), both(0x1.FEp127f)) << block;
    EXPECT_EQ(stored(block, DType::f32), both(kFloatMax)) << block;
  }
  for (const std::string_view other : {"fp8_tensor", "fp8_row"})
    EXPECT_EQ(stored(other, DType::bf16), both(kFloatMax)) << other;
  EXPECT_EQ(stored("fp8_block:pow2", DType::bf16), both(0x1p127f));
  EXPECT_EQ(stored("fp8_tensor:pow2", DType::bf16), both(0x1p127f));
}

/// The table of numerics.md 1.2.
unsigned nearest_e2m1(double x) {
  const double a = std::fabs(x);
  const unsigned index = a <= 0.25   ? 0
                         : a < 0.75  ? 1
                         : a <= 1.25 ? 2
                         : a < 1.75  ? 3
                         : a <= 2.5  ? 4
                         : a < 3.5   ? 5
                         : a <= 5    ? 6
                                     : 7;
  return index | (std::signbit(x) ? 8u : 0u);
}

TEST_P(QuantizeProperties, Mxfp4FollowsTheTableUnderTheSmallestScaleThatReachesTheAmax) {
  const int64_t m = 40, k = 100;
  for (const Kind kind : {Kind::normal, Kind::ties, Kind::outliers}) {
    const Input input({m, k}, DType::bf16, kind, 5);
    const Matrix x = input;
    const Quantized q = run("mxfp4", x);
    const auto at = [&](Direction d, int64_t o, int64_t l) {
      return static_cast<double>(load_element(x.data, x.dtype, d == kRow ? o * k + l : l * k + o));
    };
    for (const Direction d : {kRow, kCol})
      for (int64_t o = 0; o < (d == kRow ? m : k); ++o)
        for (int64_t first = 0; first < (d == kRow ? k : m); first += 32) {
          const int64_t end = std::min<int64_t>(first + 32, d == kRow ? k : m);
          double amax = 0;
          for (int64_t l = first; l < end; ++l) amax = std::max(amax, std::fabs(at(d, o, l)));
          const int byte = amax == 0 ? 0 : std::max(0, 127 + static_cast<int>(std::ceil(std::log2(amax / 6))));
          ASSERT_EQ(scale_bits(q, d, o, first), static_cast<uint32_t>(byte)) << "amax " << amax;
          for (int64_t l = first; l < end; ++l)
            ASSERT_EQ(code(q, d, o, l), nearest_e2m1(std::ldexp(at(d, o, l), 127 - byte))) << at(d, o, l);
        }
  }
}

/// A copy of x with zero rows and columns up to whole multiples of 256.
Array<float> padded(const Matrix& x, int64_t rows, int64_t cols) {
  Array<float> out(static_cast<size_t>(rows * cols));
  for (int64_t i = 0; i < x.rows; ++i)
    for (int64_t j = 0; j < x.cols; ++j)
      out[static_cast<size_t>(i * cols + j)] = load_element(x.data, x.dtype, i * x.row_stride + j);
  return out;
}

TEST_P(QuantizeProperties, ARaggedTensorIsTheCornerOfOnePaddedWithZeros) {
  const Input input({37, 150}, DType::f32, Kind::normal, 7);
  const Matrix x = input;
  const Array<float> whole = padded(x, 256, 256);
  const Matrix padded_x{whole.data(), DType::f32, 256, 256, 256};
  for (const QuantSpec& spec : all_specs()) {
    if (spec.stochastic) continue;
    SCOPED_TRACE(spec.to_string());
    const Quantized small = quantized(GetParam(), spec, x), large = quantized(GetParam(), spec, padded_x);
    for (const Direction d : {kRow, kCol}) {
      const Operand v = small.operand(d);
      for (int64_t o = 0; o < v.outer; ++o)
        for (int64_t l = 0; l < v.contraction; ++l) {
          ASSERT_EQ(code(small, d, o, l), code(large, d, o, l)) << "element " << o << ", " << l;
          ASSERT_EQ(scale_bits(small, d, o, l), scale_bits(large, d, o, l)) << "element " << o << ", " << l;
        }
    }
  }
}

TEST_P(QuantizeProperties, SwizzledScalesAreTheCompactOnesMovedAndZeroBetween) {
  for (const QuantSpec& spec : all_specs()) {
    if (!spec.swizzled) continue;
    SCOPED_TRACE(spec.to_string());
    QuantSpec compact_spec = spec;
    compact_spec.swizzled = false;
    const Input x({147, 300}, DType::bf16, Kind::normal, 9);
    const Quantized swizzled = quantized(GetParam(), spec, x), compact = quantized(GetParam(), compact_spec, x);
    for (const Direction d : {kRow, kCol}) {
      EXPECT_EQ(difference(compact.side(d).data, swizzled.side(d).data), "");
      const Operand v = compact.operand(d);
      const int64_t length = spec.row().block, blocks = (v.contraction + length - 1) / length, wide = (blocks + 3) / 4;
      std::vector<uint8_t> expected(static_cast<size_t>(swizzled.side(d).scale.size()));
      for (int64_t i = 0; i < v.outer; ++i)
        for (int64_t j = 0; j < blocks; ++j) {
          // numerics.md 4.5, with / for div.
          const int64_t offset = ((i / 128) * wide + j / 4) * 512 + (i % 32) * 16 + ((i % 128) / 32) * 4 + j % 4;
          expected[static_cast<size_t>(offset)] = static_cast<uint8_t>(scale_bits(compact, d, i, j * length));
        }
      EXPECT_EQ(difference(expected.data(), swizzled.side(d).scale.data(), swizzled.side(d).scale.size()), "");
    }
  }
}

TEST_P(QuantizeProperties, StochasticCodesAreNeighboursUnderTheScalesOfTheDeterministicOnes) {
  const Input x({70, 90}, DType::bf16, Kind::normal, 11);
  for (const std::string_view spec : {"nvfp4", "nvfp4:16x16", "nvfp4:rht"}) {
    SCOPED_TRACE(spec);
    const Quantized nearest = run(spec, x),
                    stochastic = run(text(spec, ":sr"), x, {.random = {.seed = 1, .columnwise_offset = 1}});
    int64_t moved = 0, count = 0;
    for (const Direction d : {kRow, kCol}) {
      EXPECT_EQ(difference(nearest.side(d).scale, stochastic.side(d).scale), "");
      EXPECT_EQ(difference(nearest.side(d).amax, stochastic.side(d).amax), "");
      const Operand v = nearest.operand(d);
      for (int64_t o = 0; o < v.outer; ++o)
        for (int64_t l = 0; l < v.contraction; ++l, ++count) {
          const unsigned n = code(nearest, d, o, l), s = code(stochastic, d, o, l);
          ASSERT_EQ(n & 8u, s & 8u);
          ASSERT_LE(std::abs(static_cast<int>(n & 7u) - static_cast<int>(s & 7u)), 1);
          moved += n != s;
        }
    }
    // A value at a uniform place between its neighbours rounds away from the nearer one a quarter of the time.
    EXPECT_NEAR(static_cast<double>(moved) / static_cast<double>(count), 0.25, 0.05);
  }
}

TEST_P(QuantizeProperties, SeedsAndOffsetsDrawDifferentBitsAndOnlyOfTheirOwnDirection) {
  const Input x({64, 64}, DType::bf16, Kind::normal, 13);
  const Quantized base = run("nvfp4:sr", x, {.random = {5, 6, 7}});
  const auto same = [&](const Randomness& random, Direction d) {
    return difference(base.side(d).data, run("nvfp4:sr", x, {.random = random}).side(d).data).empty();
  };
  EXPECT_TRUE(same({5, 6, 7}, kRow) && same({5, 6, 7}, kCol));
  EXPECT_TRUE(!same({4, 6, 7}, kRow) && !same({4, 6, 7}, kCol));
  EXPECT_TRUE(!same({5, 8, 7}, kRow) && same({5, 8, 7}, kCol));
  EXPECT_TRUE(same({5, 6, 8}, kRow) && !same({5, 6, 8}, kCol));
  EXPECT_TRUE(!same({5 | uint64_t{1} << 40, 6, 7}, kRow) && !same({5, 6 | uint64_t{1} << 40, 7}, kRow));
}

QUIRE_FOR_EVERY_RUNNER(QuantizeProperties);

}  // namespace
}  // namespace quire::testing
