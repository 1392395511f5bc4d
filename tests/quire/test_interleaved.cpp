// Interleaved codes: where their bytes lie, and products that read them.
#include <gtest/gtest.h>

#include <cmath>

#include "every_product.h"
#include "inputs.h"
#include "quantized.h"
#include "quire/cpu/isa.h"
#include "quire/operations/operations.h"
#include "specs.h"

namespace quire::testing {
namespace {

constexpr Direction kDirections[] = {Direction::rowwise, Direction::columnwise};

/// One direction of q in the other order.
Quantized reordered(const Quantized& q, Direction d) {
  Quantized out(q.spec.reordered(), q.rows, q.cols);
  reorder({.from = q.operand(d), .data = out.side(d).data.data(), .scale = out.side(d).scale.data()}, here());
  EXPECT_TRUE(out.intact()) << "wrote outside a buffer";
  return out;
}

/// Bytes of lines, [line][byte], moved to where numerics.md 2.4 says, and zero elsewhere.
std::vector<uint8_t> interleaved(const std::vector<std::vector<uint8_t>>& lines, int64_t size) {
  std::vector<uint8_t> out(static_cast<size_t>(size));
  for (size_t i = 0; i < lines.size(); ++i)
    for (size_t b = 0; b < lines[i].size(); ++b)
      out[(i / 16 * ((lines[i].size() + 3) / 4) + b / 4) * 64 + i % 16 * 4 + b % 4] = lines[i][b];
  return out;
}

/// A matrix of bytes as it is stored plainly; across: [byte][line].
std::vector<std::vector<uint8_t>> lines_of(const Guarded& bytes, int64_t lines, int64_t count, bool across) {
  std::vector<std::vector<uint8_t>> out(static_cast<size_t>(lines));
  for (int64_t i = 0; i < lines; ++i)
    for (int64_t b = 0; b < count; ++b)
      out[static_cast<size_t>(i)].push_back(bytes.as<uint8_t>()[across ? b * lines + i : i * count + b]);
  return out;
}

class Interleaved : public EveryRunner {};
QUIRE_FOR_EVERY_RUNNER(Interleaved);

TEST_P(Interleaved, CodesAndByteScalesAreThePlainOnesMovedAndZeroBetween) {
  for (const QuantSpec& plain_spec : plain_specs()) {
    if (plain_spec.swizzled) continue;
    SCOPED_TRACE(plain_spec.to_string());
    for (const auto& [rows, cols] : {std::array<int64_t, 2>{147, 75}, {16, 64}, {1, 3}}) {
      const Input x({rows, cols}, DType::bf16, Kind::normal, 9);
      const Quantized plain = quantized(GetParam(), plain_spec, x),
                      moved = quantized(GetParam(), plain_spec.reordered(), x);
      for (const Direction d : kDirections) {
        const Operand v = plain.operand(d);
        const QuantizedSide &from = plain.side(d), &to = moved.side(d);
        const bool across = d == Direction::columnwise && plain_spec.row().name == "mxfp8";
        const int64_t bytes = plain_spec.packed() ? (v.contraction + 1) / 2 : v.contraction;
        ASSERT_EQ(difference(interleaved(lines_of(from.data, v.outer, bytes, across), to.data.size()).data(),
                             to.data.data(), to.data.size()),
                  "");
        EXPECT_EQ(difference(from.amax, to.amax), "");
        if (plain_spec.row().scale == ScaleKind::f32) {
          EXPECT_EQ(difference(from.scale, to.scale), "");
          continue;
        }
        const int64_t blocks = (v.contraction + plain_spec.row().block - 1) / plain_spec.row().block;
        ASSERT_EQ(difference(interleaved(lines_of(from.scale, v.outer, blocks, across), to.scale.size()).data(),
                             to.scale.data(), to.scale.size()),
                  "");
      }
    }
  }
}

TEST(Reorder, TwiceGivesTheSameBytesAndOnceThoseOfTheQuantizer) {
  for (const QuantSpec& spec : all_specs()) {
    if (spec.swizzled) continue;
    SCOPED_TRACE(spec.to_string());
    for (const auto& [rows, cols] : {std::array<int64_t, 2>{33, 130}, {64, 32}, {1, 1}, {0, 5}, {5, 0}}) {
      const Input x({rows, cols}, DType::f32, Kind::normal, 5);
      const Quantized here = quantized(reference_runner(), spec, x);
      const Quantized there = quantized(reference_runner(), spec.reordered(), x);
      for (const Direction d : kDirections) {
        const Quantized moved = reordered(here, d), back = reordered(there, d);
        if (rows * cols == 0) continue;
        EXPECT_EQ(difference(there.side(d).data, moved.side(d).data), "");
        EXPECT_EQ(difference(there.side(d).scale, moved.side(d).scale), "");
        EXPECT_EQ(difference(here.side(d).data, back.side(d).data), "");
        EXPECT_EQ(difference(here.side(d).scale, back.side(d).scale), "");
      }
    }
  }
}

TEST(Reorder, ProblemsThatBreakARuleAreRefusedInWords) {
  const Quantized q(QuantSpec::parse("mxfp8:swizzled"), 20, 40), plain(QuantSpec::parse("mxfp8"), 20, 40);
  uint8_t memory[1] = {};
  const auto message = [](const ReorderProblem& p) {
    try {
      reorder(p);
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string("nothing");
  };
  const std::string swizzled = message({q.operand(Direction::rowwise), memory, memory});
  EXPECT_NE(swizzled.find("scales lie in one order (swizzled, interleaved)"), std::string::npos) << swizzled;
  const std::string nowhere = message({plain.operand(Direction::rowwise), nullptr, memory});
  EXPECT_NE(nowhere.find("rowwise_data of mxfp8:interleaved is null but has shape [32, 40]"), std::string::npos)
      << nowhere;
  EXPECT_EQ(memory[0], 0);
}

class InterleavedProduct : public ::testing::TestWithParam<Kernel> {};
INSTANTIATE_TEST_SUITE_P(All, InterleavedProduct, ::testing::ValuesIn(kernels()),
                         [](const auto& kernel) { return kernel.param.name; });

/// Random codes, infinities and NaN among them, and some lines whose scales are far from 1. Of most seeds codes of 8
/// bits are all normal numbers in the first half of the memory: kernels look for runs of them.
RandomOperand wild_operand(const char* spec, Direction d, std::array<int64_t, 2> size, uint64_t seed) {
  RandomOperand o(spec, d, size, seed, seed % 2 == 0);
  const int man_bits = o.operand.spec.element_row().man_bits;
  auto* const codes = o.memory.side(d).data.as<uint8_t>();
  for (int64_t i = 0; seed % 3 != 0 && !o.operand.spec.packed() && i < o.memory.side(d).data.size() / 2; ++i) {
    codes[i] = static_cast<uint8_t>(codes[i] | 1 << man_bits);
    if (!std::isfinite(decode(o.operand.spec.element, codes[i]))) codes[i] = static_cast<uint8_t>(codes[i] & 0xBF);
  }
  if (o.operand.spec.row().scale == ScaleKind::e8m0)
    for (int64_t line = 3; line < size[0]; line += 11)
      o.memory.side(d).scale.as<uint8_t>()[o.scale_place(line, 0)] = line % 2 ? 60 : 200;
  return o;
}

TEST_P(InterleavedProduct, HasTheBitsOfThePlainOneForAnyNumberOfRows) {
  uint64_t turn = 0;
  const Kernel& kernel = GetParam();
  for (const char* spec :
       {"fp8_tensor", "fp8_row:e5m2", "fp8_block", "mxfp8", "mxfp8:e5m2", "mxfp4", "nvfp4", "nvfp4:row_scaled"})
    for (const int64_t k : {16, 37, 256, 304, 1040})
      for (int64_t m = 1; m <= 40; m += k == 304 ? 1 : 5) {
        const int64_t n = std::array{1, 16, 37, 70, 130}[++turn % 5];
        const Direction d = kDirections[turn / 5 % 2];
        const RandomOperand a = wild_operand(spec, Direction::rowwise, {m, k}, turn),
                            b = wild_operand(spec, d, {n, k}, turn / 2);
        const Quantized moved_a = reordered(a.memory, Direction::rowwise), moved_b = reordered(b.memory, d);
        Output plain(m, n, DType::f32), one(m, n, DType::f32), both(m, n, DType::f32);
        GemmProblem p = problem(a, b, plain);
        if (!kernel.takes(p)) continue;
        kernel.run(p);
        p.b.spec = moved_b.spec, p.b.data = moved_b.side(d).data.data(), p.b.scale = moved_b.side(d).scale.data();
        p.out = one.view();
        kernel.run(p);
        const QuantizedSide& side = moved_a.side(Direction::rowwise);
        p.a.spec = moved_a.spec, p.a.data = side.data.data(), p.a.scale = side.scale.data();
        p.out = both.view();
        kernel.run(p);
        SCOPED_TRACE(to_string(p));
        for (int64_t i = 0; i < m; ++i) {
          const int64_t at = i * plain.stride;
          ASSERT_EQ(float_difference(plain.memory.as<float>() + at, one.memory.as<float>() + at, n), "") << i;
          ASSERT_EQ(float_difference(plain.memory.as<float>() + at, both.memory.as<float>() + at, n), "") << i;
        }
        EXPECT_TRUE(one.intact() && both.intact());
      }
}

TEST_P(InterleavedProduct, ARowsBitsDoNotDependOnTheOtherRows) {
  const Kernel& kernel = GetParam();
  const int64_t m = 60, n = 150, k = 600;
  for (const char* spec :
       {"fp8_tensor:interleaved", "fp8_block:128x128:interleaved", "mxfp8:interleaved", "nvfp4:interleaved"}) {
    const RandomOperand a(spec, Direction::rowwise, {m, k}, 1), b = wild_operand(spec, Direction::rowwise, {n, k}, 2);
    Output all(m, n, DType::f32);
    GemmProblem p = problem(a, b, all);
    if (!kernel.takes(p)) continue;
    kernel.run(p);
    for (const int64_t rows : {1, 2, 7, 12, 16, 31}) {
      // Where the first rows lie does not depend on how many follow.
      Output few(rows, n, DType::f32);
      p.a.outer = rows;
      p.out = few.view();
      kernel.run(p);
      for (int64_t i = 0; i < rows; ++i)
        ASSERT_EQ(float_difference(all.memory.as<float>() + i * all.stride, few.memory.as<float>() + i * few.stride, n),
                  "")
            << spec << ' ' << rows;
    }
  }
}

TEST_P(InterleavedProduct, DoesNotReadPaddingOfScalesAsNumbers) {
  const int64_t m = 40, n = 50, k = 272;  // 17 and 9 blocks, stored as 20 and 12
  for (const char* text : {"nvfp4:interleaved", "mxfp4:interleaved", "mxfp8:interleaved"}) {
    RandomOperand a(text, Direction::rowwise, {m, k}, 25), b(text, Direction::rowwise, {n, k}, 26);
    Output zero(m, n, DType::f32), nan(m, n, DType::f32);
    const GemmProblem p = problem(a, b, zero);
    if (!GetParam().takes(p)) continue;
    GetParam().run(p);
    for (RandomOperand* o : {&a, &b}) {
      const int64_t blocks = block_count(o->operand.spec, k);
      auto* scales = o->memory.side(Direction::rowwise).scale.as<uint8_t>();
      for (int64_t line = 0; line < round_up(o->operand.outer, kInterleavedLines); ++line)
        for (int64_t block = blocks; block < round_up(blocks, kInterleavedBytes); ++block)
          scales[interleaved_offset(line, block, blocks)] =
              o->operand.spec.row().scale == ScaleKind::e8m0 ? 0xFF : 0x7F;
    }
    GetParam().run(problem(a, b, nan));
    EXPECT_EQ(difference(zero.memory, nan.memory), "") << text;
  }
}

}  // namespace
}  // namespace quire::testing
