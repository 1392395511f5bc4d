// The row "vector" of dequantization: the values of all codes are those of the CPU, of every spec of the grammar that
// it takes, in each place that a code can have; what it refuses; and what it costs.
#include <gtest/gtest.h>

#include <array>
#include <iostream>
#include <random>

#include "cuda/grammar.h"
#include "cuda/many_cases.h"
#include "cuda/product_case.h"

namespace quire::testing {
namespace {

/// Bytes of a side, and what is decoded of it: all codes and scales are drawn, so that many are NaN or infinite.
class Codes {
 public:
  Codes(Twins& twins, uint64_t seed) : twins_(twins), random_(seed) {}

  uint64_t below(uint64_t n) { return random_() % n; }
  DequantizeProblem problem(const std::string& text, Direction direction, std::array<int64_t, 2> sizes, DType dtype) {
    DequantizeProblem p;
    p.spec = QuantSpec::parse(text), p.direction = direction, p.rows = sizes[0], p.cols = sizes[1];
    const BufferCounts<int64_t> count = counts(buffers<int64_t>(p.spec, {p.rows, p.cols}, direction));
    p.data = bytes(count[0]);
    p.scale = has_byte_scales(p.spec) ? static_cast<const void*>(bytes(count[1])) : numbers(count[1]);
    p.amax = count[2] ? numbers(count[2]) : nullptr;
    const bool columnwise = direction == kColumns;
    const int64_t outer = columnwise ? p.cols : p.rows, along = columnwise ? columnwise_tokens(p.spec, p.rows) : p.cols;
    p.out = {nullptr, dtype, outer, along, along + 8 * static_cast<int64_t>(below(3))};
    p.out.data = twins_.room<std::byte>(size_of_out(p));
    return p;
  }
  static int64_t size_of_out(const DequantizeProblem& p) {
    return p.out.rows * p.out.row_stride * size_of(p.out.dtype);
  }
  /// As many codes or scales.
  uint8_t* bytes(int64_t count) {
    std::vector<uint8_t> all(static_cast<size_t>(count));
    for (uint8_t& byte : all) byte = static_cast<uint8_t>(below(256));
    return twins_.array(all);
  }

 private:
  const float* numbers(int64_t count) {
    constexpr std::array special{NAN, INFINITY, 0.0f, 1e-40f, 3e38f, -2.0f};
    std::vector<float> all(static_cast<size_t>(count));
    for (float& x : all)
      x = below(9) ? std::ldexp(1.0f + static_cast<float>(below(1 << 12)) / (1 << 12), static_cast<int>(below(40)) - 20)
                   : special[below(special.size())];
    return twins_.array(all);
  }

  Twins& twins_;
  std::mt19937_64 random_;
};

/// One side of a tensor: more and fewer codes than a warp decodes of a line at a time.
constexpr auto kSizesAlong =
    std::to_array<std::array<int64_t, 2>>({{3, 1096}, {7, 2056}, {18, 136}, {2, 8}, {130, 32}, {5, 1024}});
/// Columnwise: tokens last.
constexpr auto kSizesDown =
    std::to_array<std::array<int64_t, 2>>({{1104, 4}, {2064, 4}, {144, 20}, {16, 4}, {32, 132}, {160, 36}});

TEST(Dequantize, VectorsGiveTheValuesOfTheCpuForEverySpec) {
  uint64_t taken = 0, seed = 0;
  for (const std::string& text : whole_grammar())
    for (const Direction direction : {kRows, kColumns})
      for (uint64_t turn = 0; turn < (many_cases() ? 9 : 1); ++turn) {
        Twins twins;
        Codes codes(twins, ++seed);
        const auto& sizes = direction == kRows ? kSizesAlong : kSizesDown;
        const DequantizeProblem p =
            codes.problem(text, direction, sizes[codes.below(sizes.size())], kDTypes[codes.below(3)]);
        SCOPED_TRACE(to_string(p));
        if (p.spec.interleaved) continue;
        ++taken;
        twins.kernel = "vector";
        twins.expect_same(p, {{"out", p.out.data, Codes::size_of_out(p), p.out.dtype}});
        if (HasFailure()) return;
      }
  std::cout << taken << " sides are equal\n";
}

/// Each size with each dtype, of one spec of each kind of scale.
TEST(Dequantize, VectorsTakeLinesOfEveryLength) {
  for (const char* text : {"fp8_tensor", "fp8_row:e5m2", "fp8_block", "fp8_block:128x128", "mxfp8:swizzled",
                           "mxfp8:e5m2", "mxfp4", "nvfp4:row_scaled", "nvfp4:swizzled:global=div"})
    for (const Direction direction : {kRows, kColumns})
      for (const auto& sizes : direction == kRows ? kSizesAlong : kSizesDown)
        for (const DType dtype : kDTypes) {
          Twins twins;
          const DequantizeProblem p = Codes(twins, 7).problem(text, direction, sizes, dtype);
          SCOPED_TRACE(to_string(p));
          twins.kernel = "vector";
          twins.expect_same(p, {{"out", p.out.data, Codes::size_of_out(p), p.out.dtype}});
        }
}

TEST(Dequantize, VectorsTakeGroupsInFlatBuffers) {
  for (const char* text : {"fp8_tensor", "fp8_row", "fp8_block", "mxfp8:swizzled", "mxfp4", "nvfp4:row_scaled"})
    for (const Grouping& groups : groupings())
      for (const DType dtype : kDTypes) {
        ProductCases cases{3};
        Twins& twins = cases.twins();
        const QuantSpec spec = QuantSpec::parse(text);
        const GroupSizes<int64_t> sizes{kTokens, kInputs, std::ssize(groups.ends)};
        const BufferCounts<int64_t> room = grouped_counts<int64_t>(spec, sizes, kRows);
        Codes codes(twins, 8);
        DequantizeProblem p{.spec = spec, .rows = kTokens, .cols = kInputs, .out = {}, .room = room};
        p.groups = cases.groups(groups.ends, kTokens, groups.wide);
        p.data = codes.bytes(room[0]);
        const std::vector<float> ones(static_cast<size_t>(room[1] + room[2]), 0.75f);
        p.scale = has_byte_scales(spec) ? static_cast<const void*>(codes.bytes(room[1])) : twins.array(ones);
        p.amax = room[2] ? twins.array(ones) : nullptr;
        p.out = {nullptr, dtype, kTokens, kInputs, kInputs};
        p.out.data = twins.room<std::byte>(Codes::size_of_out(p));
        SCOPED_TRACE(text + (" of groups " + std::string(groups.what)));
        twins.kernel = "vector";
        twins.expect_same(p, {{"out", p.out.data, Codes::size_of_out(p), dtype}});
      }
}

/// What the row says of a problem.
std::string verdict(const DequantizeProblem& p, CudaDevice& device) {
  const std::string all = explain_choice(p, device);
  return all.substr(0, all.find('\n'));
}

TEST(Dequantize, VectorsSayWhatTheyDoNotTake) {
  Twins twins;
  Codes codes(twins, 1);
  const auto of = [&](const char* text, Direction direction, std::array<int64_t, 2> sizes) {
    return verdict(codes.problem(text, direction, sizes, DType::bf16), twins.device);
  };
  EXPECT_EQ(of("mxfp8", kRows, {3, 64}), "vector: runs");
  EXPECT_EQ(of("mxfp8:interleaved", kRows, {3, 64}),
            "vector: reads codes in the plain order, but mxfp8:interleaved is interleaved");
  EXPECT_EQ(of("nvfp4", kRows, {3, 36}), "vector: takes lines of multiples of 8 codes, but they have 36");
  EXPECT_EQ(of("mxfp8", kColumns, {32, 6}),
            "vector: takes multiples of 4 lines that run against memory, but there are 6");
  DequantizeProblem p = codes.problem("fp8_tensor", kRows, {3, 64}, DType::f32);
  p.data = static_cast<const char*>(p.data) + 4;
  EXPECT_EQ(verdict(p, twins.device), "vector: takes codes that begin at multiples of 8 bytes");
  p = codes.problem("fp8_tensor", kRows, {3, 64}, DType::bf16);
  p.out.row_stride = 68;
  EXPECT_EQ(verdict(p, twins.device),
            "vector: takes rows that begin at multiples of 16 bytes, but those of out do not");
}

struct Cost {
  const char* spec;
  Direction direction;
  DType dtype;
  int steps;  ///< most instructions of an element, with what each warp does once
};

TEST(Dequantize, VectorsTakeFewInstructions) {
  for (const Cost& cost : {Cost{"fp8_tensor", kRows, DType::bf16, 16}, Cost{"mxfp8", kRows, DType::bf16, 18},
                           Cost{"mxfp8", kColumns, DType::bf16, 27}, Cost{"mxfp4", kRows, DType::bf16, 17},
                           Cost{"nvfp4", kRows, DType::bf16, 18}, Cost{"nvfp4", kRows, DType::f32, 24}}) {
    Twins twins;
    Codes codes(twins, 2);
    DequantizeProblem p = codes.problem(cost.spec, cost.direction, {64, 1024}, cost.dtype);
    for (int64_t i = 0; i < 64 * 1024 / (p.spec.packed() ? 2 : 1); ++i)
      const_cast<uint8_t*>(static_cast<const uint8_t*>(p.data))[i] = static_cast<uint8_t>(i % 119);
    const uint64_t before = twins.device.steps();
    dispatch(p, static_cast<const Context&>(twins.device));
    const double steps = static_cast<double>(twins.device.steps() - before) / (64 * 1024);
    EXPECT_LE(steps, cost.steps) << cost.spec;
    std::cout << cost.spec << (cost.direction == kRows ? "" : " columnwise") << ": " << steps << " steps\n";
  }
}

}  // namespace
}  // namespace quire::testing
