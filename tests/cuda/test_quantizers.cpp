// The core's headers as device code: what nvcc makes of them, run by the emulator, gives the bytes of the CPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <iostream>
#include <sstream>

#include "cuda/drawn.h"
#include "cuda/grammar.h"
#include "cuda/many_cases.h"
#include "cuda/quantizer_case.h"

namespace quire::testing {
namespace {

int64_t times_as_many(int64_t factor) { return many_cases() ? factor : 1; }

QuantizerCase random_case(QuantizerComparison& cases, const std::string& text) {
  constexpr std::array heights{1, 16, 33, 5, 17, 40, 130, 0}, widths{31, 64, 1, 130, 16, 48, 7, 0};
  const QuantSpec spec = QuantSpec::parse(text);
  QuantizerCase c{.spec = text, .dtype = std::array{DType::f32, DType::f16, DType::bf16}[cases.die(3)]};
  // Few are empty.
  const auto size = [&](const auto& sizes) {
    return sizes[cases.die(cases.die(20) ? sizes.size() - 1 : sizes.size())];
  };
  do c.rows = size(heights), c.cols = size(widths);
  while (c.rows * c.cols > 2200);
  c.stride = c.cols + (cases.die(2) ? static_cast<int64_t>(cases.die(9)) : 0);
  c.scale = spec.row().scope == Scope::tensor && cases.die(4) == 0;
  c.amax = !c.scale && !spec.given && cases.die(4) == 0;
  c.state = spec.stochastic && cases.die(2) == 0;
  return c;
}

TEST(Quantizers, EverySpecOfTheGrammarGivesTheBytesOfTheCpu) {
  const std::vector<std::string> texts = whole_grammar();
  EXPECT_EQ(texts.size(), 760u);
  QuantizerComparison cases(1);
  for (int64_t round = 0; round < 3 * times_as_many(10); ++round)
    for (size_t i = 0; i < texts.size() && !HasFailure(); ++i) {
      const uint64_t kind = (i + static_cast<size_t>(round)) % 8;
      QuantizerCase c = random_case(cases, texts[i]);
      c.reference = round % 3 == 0;  // which takes all; else what dispatch() chooses
      cases.run(c, [&](int64_t, int64_t) { return draw(cases, kind); });
    }
  RecordProperty("buffers", static_cast<int>(cases.compared));
  std::cout << cases.compared << " buffers are equal after " << cases.steps / 1'000'000 << " million instructions\n";
}

TEST(Quantizers, TheGrammarOfTheseTestsHasEveryOptionOfTheParser) {
  std::string all;
  for (const std::string& text : whole_grammar()) all += text + ":";
  std::istringstream lines(spec_grammar());
  int options = 0;
  for (std::string line; std::getline(lines, line); ++options) {
    const size_t begin = line.find('`') + 1;
    // Such as "pow2", "eps=F" for numbers F, or "rht or rht=unsigned".
    std::istringstream words(line.substr(begin, line.find('`', begin) - begin));
    for (std::string option; words >> option;) {
      if (option.ends_with("=F")) option.pop_back();
      EXPECT_TRUE(option == "or" || all.find(":" + option) != std::string::npos) << option;
    }
  }
  EXPECT_GT(options, 10);
}

struct KnownSpec {
  const char* text;
  const char* kernel;
};
constexpr std::array kKnown{KnownSpec{"mxfp8", "quantize_mxfp8"},
                            KnownSpec{"fp8_block:pow2:nan", "quantize_fp8_block_pow2_nan"},
                            KnownSpec{"nvfp4:rht:sr:swizzled", "quantize_nvfp4_rht_sr_swizzled"}};

TEST(Quantizers, AKernelOfASpecThatIsATemplateArgumentGivesTheSameBytes) {
  QuantizerComparison cases(2);
  for (const KnownSpec& known : kKnown)
    for (uint64_t kind = 0; kind < 8 * static_cast<uint64_t>(times_as_many(10)); ++kind) {
      QuantizerCase c = random_case(cases, known.text);
      c.kernel = known.kernel;
      cases.run(c, [&](int64_t, int64_t) { return draw(cases, kind % 8); });
    }
}

/// Every code's value, the numbers halfway between two, and their neighbours in float32.
std::vector<float> critical_points(Format f) {
  std::vector<float> points;
  for (int code = 0; code < row(f).max_code(); ++code) {
    const float low = decode(f, code), high = decode(f, code + 1), middle = low + (high - low) / 2;
    for (const float x : {low, std::nextafter(middle, 0.0f), middle, std::nextafter(middle, high)})
      points.insert(points.end(), {x, -x});
  }
  return points;
}

/// Unrolled code has a copy of a rule for each value of a block: each has to meet each value.
TEST(Quantizers, EachPlaceOfABlockRoundsEveryValueHalfwayBetweenTwoCodes) {
  QuantizerComparison cases(3);
  for (const auto& [text, format] : {std::pair{"mxfp8", Format::e4m3},
                                     {"mxfp8:e5m2", Format::e5m2},
                                     {"mxfp8:32x32", Format::e4m3},
                                     {"mxfp8:e5m2:32x32", Format::e5m2},
                                     {"mxfp4", Format::e2m1}}) {
    // A power of two above 2^-6 of the largest value in each block makes its scale 1: the rest are as they are.
    const std::vector<float> points = critical_points(format);
    const int64_t per_row = 31, rows = ceil_div(static_cast<int64_t>(points.size()), per_row);
    for (int64_t place = 0; place < 32; place += 4 / times_as_many(4)) {
      const QuantizerCase c{.spec = text, .rows = rows, .cols = 32, .stride = 32};
      cases.device().run_code_of(place % 8 == 0 ? 80 : 89);
      cases.run(c, [&](int64_t i, int64_t j) {
        if (j == place) return largest(format);
        const int64_t n = i * per_row + (j + 32 - place) % 32 - 1;
        return points[static_cast<size_t>(n) % points.size()];
      });
    }
  }
}

TEST(Quantizers, EachPlaceOfABlockMeetsEveryValueOfItsDtype) {
  QuantizerComparison cases(4);
  const int64_t rows = 64, cols = 1024, step = 8 / times_as_many(8);
  for (const KnownSpec& known : kKnown)
    for (const DType dtype : {DType::bf16, DType::f16})
      for (int64_t place = 0; place < 32; place += step) {
        // The next place is one to the right and one down.
        const QuantizerCase c{
            .spec = known.text, .dtype = dtype, .rows = rows, .cols = cols, .stride = cols, .kernel = known.kernel};
        cases.run(c, [&](int64_t i, int64_t j) {
          const auto bits = static_cast<uint16_t>((i * cols + j + place * (cols + 1)) * 9);
          return dtype == DType::f16 ? f16_to_f32(bits) : bf16_to_f32(bits);
        });
      }
}

}  // namespace
}  // namespace quire::testing
