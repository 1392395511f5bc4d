// Conversions: the slow codec against the definition of a format, the fast ones against the slow one on every code and
// every halfway point.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "inputs.h"
#include "quire/format/codec.h"
#include "quire/format/fast.h"
#include "quire/format/half.h"
#include "quire/format/pack.h"

namespace quire::testing {
namespace {

uint32_t bits(float x) { return std::bit_cast<uint32_t>(x); }
float from_bits(uint32_t u) { return std::bit_cast<float>(u); }

/// float16 and bfloat16 as rows, so that the codec's bisection is the oracle of half.h too.
constexpr FormatRow kF16{"f16", 5, 10, 15, Specials::ieee, true};
constexpr FormatRow kBf16{"bf16", 8, 7, 127, Specials::ieee, true};

/// Every value of a row, every point halfway between neighbours, and the floats on either side of each, with both
/// signs.
std::vector<float> critical_points(const FormatRow& f) {
  std::vector<float> out;
  const auto add = [&](double x) {
    const float nearest = static_cast<float>(x);
    for (const float y : {nearest, std::nextafterf(nearest, 0.0f), std::nextafterf(nearest, HUGE_VALF)}) {
      out.push_back(y);
      out.push_back(-y);
    }
  };
  for (int code = 0; code <= f.max_code(); ++code) {
    const double low = static_cast<double>(decode(f, code));
    // Above the largest value, the halfway point to what would follow it.
    const double step = code == f.max_code() ? low - static_cast<double>(decode(f, code - 1))
                                             : static_cast<double>(decode(f, code + 1)) - low;
    add(low);
    add(low + step / 2);
  }
  for (const uint32_t u :
       {0x7F800000u, 0x7F7FFFFFu, 0x7FC00000u, 0x7F800001u, 0x7FFFFFFFu, 1u, 0x007FFFFFu, 0x00800000u})
    for (const uint32_t sign : {0u, 0x80000000u}) out.push_back(from_bits(u | sign));
  return out;
}

/// A sample of all floats: every 4099th pattern, so that all exponents and many fractions come up.
template <class Check>
void sweep(const Check& check) {
  for (uint64_t u = 0; u < uint64_t{1} << 32; u += 4099) check(from_bits(static_cast<uint32_t>(u)));
}

template <Format F>
void expect_fast_encoder() {
  const FormatRow& f = row(F);
  const auto check = [&](float x) { ASSERT_EQ(encode(f, x), int{encode_fast<F>(x)}) << f.name << " of " << x; };
  for (const float x : critical_points(f)) check(x);
  sweep(check);
}

TEST(Formats, FastEncodersAgreeWithTheSlowOne) {
  expect_fast_encoder<Format::e4m3>();
  expect_fast_encoder<Format::e5m2>();
  expect_fast_encoder<Format::e2m1>();
  expect_fast_encoder<Format::e3m2>();
  expect_fast_encoder<Format::e2m3>();
}

template <Format F>
void expect_fast_decoder() {
  // Bits above the code's are not its own.
  for (uint32_t code = 0; code < 256; ++code) {
    const float slow = decode(F, static_cast<int>(code) & (row(F).codes() - 1)), fast = decode_fast<F>(code);
    ASSERT_TRUE(bits(slow) == bits(fast) || (slow != slow && fast != fast)) << row(F).name << " " << code;
  }
}

TEST(Formats, FastDecodersAgreeWithTheSlowOne) {
  expect_fast_decoder<Format::e4m3>();
  expect_fast_decoder<Format::e5m2>();
  expect_fast_decoder<Format::e2m1>();
  expect_fast_decoder<Format::e3m2>();
  expect_fast_decoder<Format::e2m3>();
}

TEST(Formats, EveryNumberEncodesToItsOwnCode) {
  for (const FormatRow& f : kFormats)
    for (int code = 0; f.is_signed && code < f.codes(); ++code) {
      const float value = decode(f, code);
      if (!std::isfinite(value)) continue;
      ASSERT_EQ(code, encode(f, value)) << f.name;
    }
}

TEST(Formats, EncodingRoundsToTheNearestAndTiesToTheEvenCode) {
  for (const FormatRow& f : kFormats)
    for (int code = 0; f.is_signed && code < f.max_code(); ++code) {
      const float middle = (decode(f, code) + decode(f, code + 1)) / 2;
      EXPECT_EQ(encode(f, middle), code + code % 2) << f.name << " tie at " << middle;
      EXPECT_EQ(encode(f, std::nextafterf(middle, 0.0f)), code) << f.name;
      EXPECT_EQ(encode(f, std::nextafterf(middle, HUGE_VALF)), code + 1) << f.name;
      EXPECT_EQ(encode(f, -middle), (code + code % 2) | f.magnitudes()) << f.name;
    }
}

TEST(Formats, NanLosesItsSignInfinitySaturatesAndZeroKeepsItsSign) {
  for (const FormatRow& f : kFormats) {
    if (!f.is_signed) continue;
    EXPECT_EQ(encode(f, from_bits(0x7FC00000u)), f.magnitudes() - 1) << f.name;
    EXPECT_EQ(encode(f, from_bits(0xFFC00000u)), f.magnitudes() - 1) << f.name;
    EXPECT_EQ(encode(f, HUGE_VALF), f.max_code()) << f.name;
    EXPECT_EQ(encode(f, -HUGE_VALF), f.max_code() | f.magnitudes()) << f.name;
    EXPECT_EQ(encode(f, -0.0f), f.magnitudes()) << f.name;
    EXPECT_EQ(encode(f, -0x1p-149f), f.magnitudes()) << f.name;
  }
}

TEST(Formats, ValuesAreThoseOfTheOcpTables) {
  static_assert(largest(Format::e4m3) == 448.0f && largest(Format::e5m2) == 57344.0f && largest(Format::e2m1) == 6.0f);
  static_assert(largest(Format::e3m2) == 28.0f && largest(Format::e2m3) == 7.5f);
  EXPECT_EQ(decode(Format::e4m3, 0x01), 0x1p-9f);
  EXPECT_EQ(decode(Format::e4m3, 0x08), 0x1p-6f);
  EXPECT_EQ(decode(Format::e5m2, 0x01), 0x1p-16f);
  EXPECT_EQ(decode(Format::e5m2, 0x7C), HUGE_VALF);
  EXPECT_EQ(decode(Format::e3m2, 0x01), 0.0625f);
  EXPECT_EQ(decode(Format::e2m3, 0x01), 0.125f);
  EXPECT_EQ(decode(Format::e8m0, 0), 0x1p-127f);
  EXPECT_EQ(decode(Format::e8m0, 254), 0x1p127f);
  EXPECT_TRUE(std::isnan(decode(Format::e8m0, 255)) && std::isnan(decode(Format::e4m3, 0x7F)));
  constexpr float kE2m1[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  for (int code = 0; code < 16; ++code)
    EXPECT_EQ(decode(Format::e2m1, code), (code < 8 ? 1.0f : -1.0f) * kE2m1[code % 8]);
}

TEST(Formats, HalvesWidenToTheValuesOfTheirBits) {
  for (int code = 0; code < 65536; ++code) {
    const float f16 = decode(kF16, code), bf16 = decode(kBf16, code);
    const float wide_f16 = f16_to_f32(static_cast<uint16_t>(code)),
                wide_bf16 = bf16_to_f32(static_cast<uint16_t>(code));
    ASSERT_TRUE(bits(f16) == bits(wide_f16) || (f16 != f16 && wide_f16 != wide_f16)) << code;
    ASSERT_TRUE(bits(bf16) == bits(wide_bf16) || (bf16 != bf16 && wide_bf16 != wide_bf16)) << code;
  }
}

/// Narrowing saturates nowhere: past the point halfway to the next power of two it is infinity.
void expect_narrows(const FormatRow& f, uint16_t (*narrow)(float), float overflow) {
  const auto check = [&](float x) {
    const int infinity = f.max_code() + 1;
    const int magnitude = std::fabs(x) >= overflow ? infinity : encode(f, std::fabs(x));
    const int expected = magnitude | (std::signbit(x) ? 0x8000 : 0);
    if (x == x) {
      ASSERT_EQ(expected, int{narrow(x)}) << f.name << " of " << x;
    } else {
      ASSERT_GT(narrow(x) & 0x7FFF, infinity) << f.name << " of NaN " << bits(x);
    }
  };
  for (const float x : critical_points(f)) check(x);
  sweep(check);
}

TEST(Formats, HalvesNarrowToTheNearestAndTiesToEven) {
  expect_narrows(kF16, f32_to_f16, 65520.0f);
  expect_narrows(kBf16, f32_to_bf16, 0x1.FFp127f);
}

TEST(Formats, TheEvenElementIsTheLowNibble) {
  for (unsigned even = 0; even < 16; ++even)
    for (unsigned odd = 0; odd < 16; ++odd) {
      const uint8_t byte = pack(even, odd);
      EXPECT_EQ(int{byte}, static_cast<int>(even | odd << 4));
      EXPECT_EQ(unpack(&byte, 0), even);
      EXPECT_EQ(unpack(&byte, 1), odd);
    }
}

}  // namespace
}  // namespace quire::testing
